"""The newest checkpoint of a training, by its name.

Only numbered checkpoints count: fairseq writes them under another name first, then renames them. It copies
checkpoint_last.pt and checkpoint_best.pt in place, so a kill may cut these short.
"""

from __future__ import annotations

import re
from pathlib import Path

NUMBERED = re.compile(r"checkpoint_?(?:stopped_)?(\d+)(?:_(\d+))?\.pt")
"""checkpoint7.pt (end of epoch 7), checkpoint_7_900.pt (update 900), checkpoint_stopped_7_930.pt (early_stop.py)."""


def newest(folder: Path) -> Path | None:
    """The numbered checkpoint that was trained longest; of two equals, that of a stop. Files' times do not count."""

    def trained(path: Path) -> tuple[int, float, bool]:
        epoch, update = NUMBERED.fullmatch(path.name).groups()  # type: ignore[union-attr]
        return int(epoch), float(update or "inf"), "stopped" in path.name

    return max((path for path in folder.glob("*.pt") if NUMBERED.fullmatch(path.name)), key=trained, default=None)


def reached(checkpoint: Path | None) -> int:
    """The update in a checkpoint's name; 0 without a checkpoint, or for the end of an epoch."""
    match = NUMBERED.fullmatch(checkpoint.name) if checkpoint else None
    return int(match[2] or 0) if match else 0


def furthest(folder: Path, unit: str) -> int:
    """Number of updates or epochs that a run was trained for, by the names of its files."""
    ended, saved = {
        "updates": (r"trained-(\d+)", r"checkpoint_(?:stopped_)?\d+_(\d+)\.pt"),
        "epochs": (r"trained-(\d+)-epochs", NUMBERED.pattern),
    }[unit]
    names = [path.name for path in (*folder.glob("trained-*"), *folder.glob("checkpoints/*.pt"))]
    matches = [match for name in names if (match := re.fullmatch(ended, name) or re.fullmatch(saved, name))]
    return max((int(match[1]) for match in matches), default=0)
