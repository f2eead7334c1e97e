"""Records of settings, options and files, and the differences between two records.

The record of a run is settings.json in its folder. Changed settings replace a record as long as no model was trained
with the old settings; after that, they are refused.
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
"""Values by name. The value of a file is its description (`describe`)."""
NAMED = 3
"""Number of differences that a message names."""
MODEL = re.compile(r"trained-.*|result\.csv|checkpoint.*\.pt|average\.pt|model\.pt")
"""Names of files that only a training leaves: the mark of its end, a grid's result, a checkpoint, a model."""


def options(words: Iterable[str]) -> Settings:
    """The options of a command line, by name. As in the command, the last value of an option counts."""
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
    """Describe a file: its `path`, its size in `bytes`, the time it was `changed` (nanoseconds), and its `sha256`.

    Args:
        known: an earlier description, which is returned if the file has not changed since.
    """
    path, status = path.absolute(), path.stat()
    # The time of modification would not do: programs that copy a file may set it.
    now = {"path": str(path), "bytes": status.st_size, "changed": status.st_ctime_ns}
    if known is not None and all(known[name] == value for name, value in now.items()):
        return known
    return {**now, "sha256": digest(path, "sha256")}


def _shown(value: Any) -> str:
    if isinstance(value, dict) and "sha256" in value:
        return f"{value['path']} ({value['bytes']} bytes, SHA-256 {value['sha256'][:12]}...)"
    return str(value)


def _identity(value: Any) -> Any:
    """The form in which values are compared. A file is the hash of its content, not its path. 1e-3 equals 0.001."""
    try:
        return value.get("sha256", value) if isinstance(value, dict) else float(value)
    except (TypeError, ValueError):
        return value


def differences(before: Settings, now: Settings) -> list[str]:
    """The differences, each as "name before -> now"."""
    both = {name: (before.get(name, "unset"), now.get(name, "unset")) for name in sorted(before.keys() | now.keys())}
    return [
        f"{name} {_shown(old)} -> {_shown(new)}"
        for name, (old, new) in both.items()
        if _identity(old) != _identity(new)
    ]


def read(path: Path) -> Settings:
    """Read a record. It is empty if the file does not exist.

    Raises:
        ValueError: the file is not JSON, for instance after a loss of power.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        advice = "Remove only this file if everything else in its folder was made with the present settings."
        raise ValueError(f"{path}: cannot be read ({error}); expected JSON. {advice}") from None


def trained_run(models: Path) -> Path | None:
    """The first run below a folder that has a model or a checkpoint; None if no run has."""
    model = next((path for path in sorted(models.rglob("*")) if MODEL.fullmatch(path.name)), None)
    return model and (model.parents[1] if model.parent.name in ("checkpoints", "model") else model.parent)


def refuse(folder: Path, changed: list[str], models: Path) -> None:
    """Refuse to rebuild a folder with other settings if a model depends on it.

    Args:
        changed: the changed settings, from `differences`.
        models: folder of the models that would depend on it.

    Raises:
        ValueError: there is such a model, or another process is training one.
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
    """Write the record of a folder. If there is one, compare it with the settings first.

    Raises:
        ValueError: the settings differ, and the folder has a model trained with the recorded settings.
    """
    changed = differences(read(path), settings) if path.exists() else []
    refuse(path.parent, changed, path.parent)
    if changed or not path.exists():
        write_lines(path, [json.dumps(settings, indent=2)])
