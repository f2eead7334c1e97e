"""Records of settings, options and files, and the differences of two records.

A run's record is settings.json in its folder, and a grid's in its own. Others take its place while no model was trained
with the old ones, and are refused once one was.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from recipes.steps.common import write_lines
from recipes.steps.guard import locked
from recipes.steps.table import digest

Settings = dict[str, Any]
"""Values by name; of a file, `describe`'s."""
NAMED = 3
"""So many differences are named."""
MODEL = re.compile(r"trained-.*|result\.csv|checkpoint.*\.pt|average\.pt|model\.pt")
"""Names of files that only a training leaves: the mark of its end, a grid's result, a checkpoint, a model."""


def options(words: Iterable[str]) -> Settings:
    """A command line's options by name; the last of a name counts, as with the command."""
    values: Settings = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            values[name] = value or "on"
        else:
            values[name] = word if values.get(name, "on") == "on" else f"{values[name]} {word}"
    return values


def describe(path: Path, known: Settings | None = None) -> Settings:
    """A file as it is now: `path`, `bytes`, the time it was `changed` in nanoseconds, `sha256`.

    Its hash is taken from what is known of it, if it has not changed since.
    """
    path, status = path.absolute(), path.stat()
    # Not the time of modification, which a program that copies a file may set.
    now = {"path": str(path), "bytes": status.st_size, "changed": status.st_ctime_ns}
    if known is not None and all(known[name] == value for name, value in now.items()):
        return known
    return {**now, "sha256": digest(path, "sha256")}


def _shown(value: Any) -> str:
    if isinstance(value, dict) and "sha256" in value:
        return f"{value['path']} ({value['bytes']} bytes, SHA-256 {value['sha256'][:12]}...)"
    return str(value)


def _identity(value: Any) -> Any:
    """A value for comparing: a file is its content, wherever it is; 1e-3 is 0.001."""
    try:
        return value.get("sha256", value) if isinstance(value, dict) else float(value)
    except (TypeError, ValueError):
        return value


def differences(before: Settings, now: Settings) -> list[str]:
    """The differences, as "name before -> now"."""
    both = {name: (before.get(name, "unset"), now.get(name, "unset")) for name in sorted(before.keys() | now.keys())}
    return [
        f"{name} {_shown(old)} -> {_shown(new)}"
        for name, (old, new) in both.items()
        if _identity(old) != _identity(new)
    ]


def read(path: Path) -> Settings:
    """A record; an empty one if there is no such file.

    Raises:
        ValueError: the file is something else, as after a loss of power.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        what = "expected JSON. Remove this file alone, if all else in its folder is of the settings that are given now."
        raise ValueError(f"{path}: cannot be read ({error}); {what}") from None


def trained_run(models: Path) -> Path | None:
    """The folder of the first run below a folder that has a model or a checkpoint, if there is one."""
    model = next((path for path in sorted(models.rglob("*")) if MODEL.fullmatch(path.name)), None)
    return model and (model.parents[1] if model.parent.name in ("checkpoints", "model") else model.parent)


def refuse(folder: Path, changed: list[str], models: Path) -> None:
    """Refuse to rebuild a folder with other settings if a model depends on it.

    Args:
        changed: what differs, as `differences` has it.
        models: where such models would be.

    Raises:
        ValueError: there is one, or another process is at work on one.
    """
    if not changed:
        return
    shown = "; ".join([*changed[:NAMED], *([f"{len(changed) - NAMED} more"] if len(changed) > NAMED else [])])
    message = f"{folder} was made with other settings ({shown})"
    if run := trained_run(models):
        raise ValueError(
            f"{message}, and {run} holds a model of them. Go on with the old ones, remove {models} to begin again, or "
            "write elsewhere with RUNS=."
        )
    for lock in sorted(models.rglob(".guard*")):
        try:
            if lock.parent != folder:
                with locked(lock, wait=False):
                    pass
        except ValueError as error:
            raise ValueError(f"{message}; {error}") from None


def check_unchanged(path: Path, settings: Settings) -> None:
    """Write the record of a folder, or check that it is the one written there.

    Raises:
        ValueError: they differ, and that folder has a model of the old ones.
    """
    changed = differences(read(path), settings) if path.exists() else []
    refuse(path.parent, changed, path.parent)
    if changed or not path.exists():
        write_lines(path, [json.dumps(settings, indent=2)])
