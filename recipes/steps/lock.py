"""What was found when a file was first used, recorded and held from then on.

A JSON file beside the archives. `archives` has bytes and SHA-256 of those that the table knows no SHA-256 of; `lines`
has the number of lines of what was extracted, by archive, member and kind.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recipes.steps.common import replacing


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The sections of a lock file; none if there is no file yet.

    Raises:
        ValueError: it is no lock file.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); expected JSON. Mend it, or remove it.") from None
    if not isinstance(found, dict) or not all(isinstance(section, dict) for section in found.values()):
        raise ValueError(f"{path}: expected a JSON object of sections. Mend it, or remove it.")
    return found


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait until no other process is in a block of the same path; the kernel ends a killed one's turn."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        yield


def recorded(path: Path, section: str, key: str) -> Any:
    """What was recorded, or None."""
    return read(path).get(section, {}).get(key)


def hold(path: Path, section: str, key: str, value: Any) -> None:
    """Record the value, or check it against the recorded one. Safe beside other processes.

    Raises:
        ValueError: another value was recorded.
    """
    # The lock file itself is replaced, so what is locked is a file beside it.
    with alone(path.with_name(f".{path.name}.guard")):
        sections = read(path)
        known = sections.setdefault(section, {}).get(key)
        if known is None:
            sections[section][key] = value
            with replacing(path) as part:
                part.write_text(json.dumps(sections, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        elif known != value:
            raise ValueError(
                f"{key}: found {show(value)}, but the first time it was {show(known)} ({path}). If the new one is "
                f"right, remove {json.dumps(key)} there; if not, remove the file and fetch it again."
            )


def show(value: Any) -> str:
    return ", ".join(f"{name} {part}" for name, part in value.items()) if isinstance(value, dict) else str(value)
