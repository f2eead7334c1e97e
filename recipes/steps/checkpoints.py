"""Which checkpoint of a training is the newest, by its name.

Numbered ones alone: fairseq writes these next to their place and renames them; checkpoint_last.pt and
checkpoint_best.pt it copies in place, so a kill may cut those short.
"""

from __future__ import annotations

import re
from pathlib import Path

NUMBERED = re.compile(r"checkpoint_?(?:stopped_)?(\d+)(?:_(\d+))?\.pt")
"""checkpoint7.pt, of the end of an epoch, checkpoint_7_900.pt, or checkpoint_stopped_7_930.pt (early_stop.py)."""


def newest(folder: Path) -> Path | None:
    """The numbered checkpoint that was trained longest, whatever the times of the files."""

    def trained(path: Path) -> tuple[int, float]:
        epoch, update = NUMBERED.fullmatch(path.name).groups()  # type: ignore[union-attr]
        return int(epoch), float(update or "inf")

    return max((path for path in folder.glob("*.pt") if NUMBERED.fullmatch(path.name)), key=trained, default=None)


def reached(checkpoint: Path | None) -> int:
    """The update in a checkpoint's name; 0 without one, or of an epoch's end."""
    match = NUMBERED.fullmatch(checkpoint.name) if checkpoint else None
    return int(match[2] or 0) if match else 0


def furthest(folder: Path, unit: str) -> int:
    """Number of updates, or epochs, trained in a run's folder, by the names of its files."""
    ended, saved = {
        "updates": (r"trained-(\d+)", r"checkpoint_(?:stopped_)?\d+_(\d+)\.pt"),
        "epochs": (r"trained-(\d+)-epochs", NUMBERED.pattern),
    }[unit]
    names = [path.name for path in (*folder.glob("trained-*"), *folder.glob("checkpoints/*.pt"))]
    matches = [match for name in names if (match := re.fullmatch(ended, name) or re.fullmatch(saved, name))]
    return max((int(match[1]) for match in matches), default=0)
