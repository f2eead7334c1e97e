"""Hold a folder to what it was made from: its settings, the options of its commands, the files it was read from.

The file settings.json is written once and then compared with. Other settings take its place where no model was trained
with the old ones, and are refused where one was.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

from recipes.steps.common import read_lines, write_lines
from recipes.steps.guard import others_in

log = logging.getLogger(__name__)
Settings = dict[str, Any]
"""Strings by name; of a file that was read, an `inputs.Input`."""

# So many differences are named.
NAMED = 3
# What only a training leaves: the mark of its end, a checkpoint, a model.
MODEL = re.compile(r"trained(-.*|\.json)|checkpoint.*\.pt|average\.pt|model\.pt")
# How far a training came, by what its files are called.
REACHED = {
    "updates": re.compile(r"trained-(\d+)|checkpoint_\d+_(\d+)\.pt"),
    "epochs": re.compile(r"trained-(\d+)-epochs|checkpoint(\d+)\.pt|checkpoint_(\d+)_\d+\.pt"),
}


def options(words: list[str]) -> Settings:
    """A command line's options by name; the last of a name counts, as with the command."""
    found: Settings = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            found[name] = value or "on"
        else:
            found[name] = word if found.get(name, "on") == "on" else f"{found[name]} {word}"
    return found


def shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return f"{value['path']} ({value['bytes']} bytes, SHA-256 {value['sha256'][:12]}...)"
    return str(value)


def identity(value: Any) -> Any:
    """What tells two values apart: of a file its content, wherever it is; 1e-3 is 0.001."""
    try:
        return value["sha256"] if isinstance(value, dict) else float(value)
    except ValueError:
        return value


def differences(held: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """What differs, as "name old -> new"."""
    return [
        f"{name} {shown(held.get(name, 'unset'))} -> {shown(settings.get(name, 'unset'))}"
        for name in sorted(held.keys() | settings.keys())
        if identity(held.get(name, "unset")) != identity(settings.get(name, "unset"))
    ]


def read(path: Path) -> Settings:
    """The settings held by a file.

    Raises:
        ValueError: it is not such a file.
    """
    try:
        return json.loads("\n".join(read_lines(path)))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}: cannot be read ({error}); expected JSON. Remove this file alone, if all else in its folder was "
            "made with the settings that are given now."
        ) from None


def model(folder: Path | None) -> Path | None:
    """The folder of a model that was trained in this one or below."""
    files = sorted(path for path in folder.rglob("*") if MODEL.fullmatch(path.name)) if folder else []
    here = next(iter(files), None)
    return here and (here.parents[1] if here.parent.name in ("checkpoints", "model") else here.parent)


def change(path: Path, settings: Settings, changed: list[str], models: Path | None) -> str:
    """In what the settings written there differ from these, which may take their place; empty where they do not.

    Args:
        path: the file.
        settings: what is wanted now.
        changed: what else has changed.
        models: the folder where models would be that depend on them.

    Raises:
        ValueError: they differ, and a model depends on the old ones, or another make is at work with them.
    """
    changed = [*differences(read(path), settings), *changed] if path.exists() else []
    if not changed:
        return ""
    named = "; ".join([*changed[:NAMED], *([f"{len(changed) - NAMED} more"] if len(changed) > NAMED else [])])
    trained = model(models)
    if trained:
        raise ValueError(
            f"{path.parent} was made with other settings ({named}), and {trained} holds a model of "
            f"them. Go on with the old ones, remove {models} to begin again, or write elsewhere with RUNS=."
        )
    busy = others_in(models) if models else None
    if busy:
        raise ValueError(
            f"{path.parent} was made with other settings ({named}), and another make works with them in {busy}. "
            "Wait for its end or stop it, go on with the old ones, or write elsewhere with RUNS=."
        )
    return named


def hold(path: Path, settings: Settings, changed: list[str], models: Path | None) -> None:
    """Write the settings next to the results, or check that they are the ones written there; as `change`."""
    differs = change(path, settings, changed, models)
    if differs:
        log.info("%s: %s; making again what depends on it", path, differs)
    if differs or not path.exists():
        write_lines(path, [json.dumps(settings, indent=2)])


def check_length(folder: Path, unit: str, length: int) -> None:
    """A training cannot be taken back.

    Args:
        folder: the run's folder.
        unit: "updates" or "epochs".
        length: how many are wanted.

    Raises:
        ValueError: the run came further.
    """
    names = [path.name for path in (*folder.glob("trained-*"), *folder.glob("checkpoints/*.pt"))]
    matches = filter(None, map(REACHED[unit].fullmatch, names))
    reached = max((int(number) for match in matches for number in match.groups() if number), default=0)
    if reached > length:
        raise ValueError(
            f"{unit.upper()}={length} is less than {folder} was trained for, {reached}. Give {unit.upper()}={reached} "
            "or more, remove that folder to begin again, or write elsewhere with RUNS=."
        )


def check_average(known: str | None, wanted: str, folder: Path, kind: str) -> None:
    """Another number of checkpoints than is known to be averaged can be only while there are so many.

    Raises:
        ValueError: there are fewer.
    """
    if known in (None, wanted):
        return
    pattern = {"epochs": "checkpoint[0-9]*.pt", "updates": "checkpoint_*_*.pt"}[kind]
    kept = len(list(folder.glob(f"checkpoints/{pattern}")))
    if list(folder.glob("trained-*")) and kept < int(wanted):
        raise ValueError(
            f"AVERAGE {known} -> {wanted}: {folder}/checkpoints holds {kept} to average. Give "
            f"AVERAGE={known}, train on with more {kind.upper()}, or remove {folder}."
        )
