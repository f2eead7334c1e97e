"""What a text was read from: paths, sizes and SHA-256. The step that reads records them; every later make looks again.

A file's SHA-256 is taken again only where its size or the time of its last change is another than recorded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recipes.steps import lock
from recipes.steps.table import digest

Input = dict[str, Any]
"""`path`, `bytes`, `changed` (nanoseconds) and `sha256` of a file."""


def unpacked(folder: Path, name: str) -> Path | None:
    """The file of that name in a folder, compressed or not.

    Raises:
        ValueError: both are there.
    """
    there = [path for path in (folder / f"{name}.gz", folder / name) if path.is_file()]
    if len(there) > 1:
        raise ValueError(f"{folder}: holds {name} and {name}.gz, expected one of them. Move the other away.")
    return next(iter(there), None)


def describe(path: Path, known: Input | None = None) -> Input:
    """The file as it is now; its hash is taken from what is known of it, if it has not changed since.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    try:
        path, status = path.absolute(), path.stat()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; expected a file. Check the path.") from None
    # Not the time of modification, which whoever copies a file may set.
    now = {"path": str(path), "bytes": status.st_size, "changed": status.st_ctime_ns}
    if known is not None and all(known[name] == value for name, value in now.items()):
        return known
    return {**now, "sha256": digest(path, "sha256")}


def read(record: Path) -> dict[str, Input]:
    """The recorded inputs by name; none if nothing is recorded yet."""
    return lock.read(record).get("inputs", {})


def write(record: Path, inputs: dict[str, Input]) -> None:
    """Record these inputs, in place of older ones of the same names."""
    with lock.changing(record) as sections:
        sections.setdefault("inputs", {}).update(inputs)


def present(recorded: dict[str, Input], data: Path | None, archives: Path | None) -> dict[str, Input | None]:
    """What the recorded inputs would be if they were read now.

    Args:
        recorded: as `read` gives them.
        data: the folder or archive that the user names; None: none, and then what is not in `archives` is as it was.
        archives: the folder of downloads.

    Returns:
        by name; None for one that is not in `data`.
    """
    now: dict[str, Input | None] = {}
    for name, known in recorded.items():
        folder = data or archives
        path = folder if folder and folder.name == name and folder.is_file() else folder and unpacked(folder, name)
        now[name] = describe(path, known) if path else None if data else known
    return now
