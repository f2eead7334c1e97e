"""What was found when a file was first used, recorded and held from then on.

A JSON file next to the archives. `archives` has bytes and SHA-256 of those that the table knows no SHA-256 of; `lines`
has the number of lines of what was extracted, by archive, member and kind.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recipes.steps.common import replacing
from recipes.steps.guard import alone


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The sections of a lock file; none if there is no file yet.

    Raises:
        ValueError: it is not a lock file.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); expected JSON. Fix it, or remove it.") from None
    if not isinstance(found, dict) or not all(isinstance(section, dict) for section in found.values()):
        raise ValueError(f"{path}: expected a JSON object of sections. Fix it, or remove it.")
    return found


def recorded(path: Path, section: str, key: str) -> Any:
    """What was recorded, or None."""
    return read(path).get(section, {}).get(key)


@contextmanager
def changing(path: Path) -> Iterator[dict[str, dict[str, Any]]]:
    """The sections, to change; written at the end of the block. Other processes may do so at the same time."""
    # The file itself is replaced, so what is locked is a file next to it.
    with alone(path.with_name(f".{path.name}.guard")):
        before, sections = read(path), read(path)
        yield sections
        if sections != before:
            with replacing(path) as part:
                part.write_text(json.dumps(sections, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def hold(path: Path, section: str, key: str, value: Any) -> None:
    """Record the value, or check it against the recorded one.

    Raises:
        ValueError: another value was recorded.
    """
    with changing(path) as sections:
        known = sections.setdefault(section, {}).setdefault(key, value)
        if known != value:
            raise ValueError(
                f"{key}: found {json.dumps(value)}, but the first time it was {json.dumps(known)} ({path}). If the new "
                f"one is right, remove {json.dumps(key)} there; if not, remove the file and fetch it again."
            )
