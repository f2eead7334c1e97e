"""What was found when a file was first used, recorded in a JSON file next to it and held from then on."""

from __future__ import annotations

import json
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


def hold(path: Path, section: str, key: str, value: Any) -> None:
    """Record the value, or check it against the recorded one. Other processes may do so at the same time.

    Raises:
        ValueError: another value was recorded.
    """
    # The file itself is replaced, so what is locked is a file next to it.
    with alone(path.with_name(f".{path.name}.guard")):
        sections = read(path)
        known = sections.setdefault(section, {}).setdefault(key, value)
        if known != value:
            raise ValueError(
                f"{key}: found {json.dumps(value)}, but the first time it was {json.dumps(known)} ({path}). If the new "
                f"one is right, remove {json.dumps(key)} there; if not, remove the file and fetch it again."
            )
        with replacing(path) as part:
            part.write_text(json.dumps(sections, indent=1, sort_keys=True) + "\n", encoding="utf-8")
