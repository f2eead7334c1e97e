"""The checkpoints of a training, newest first by their names, and whether they are whole.

Only numbered checkpoints count: fairseq writes them under another name first, then renames them. It copies
checkpoint_last.pt and checkpoint_best.pt in place, so a kill may cut these short. A loss of power may damage any file.
"""

from __future__ import annotations

import logging
import re
import zipfile
from pathlib import Path

from fairseq_admin.errors import AdminError

log = logging.getLogger(__name__)
NUMBERED = re.compile(r"checkpoint_?(?:stopped_)?(\d+)(?:_(\d+))?\.pt")
"""checkpoint7.pt (end of epoch 7), checkpoint_7_900.pt (update 900), checkpoint_stopped_7_930.pt (early_stop.py)."""


def numbered(folder: Path) -> list[Path]:
    """The numbered checkpoints, the longest trained first; of two equals, that of a stop. Times do not count."""

    def trained(path: Path) -> tuple[int, float, bool]:
        epoch, update = NUMBERED.fullmatch(path.name).groups()  # type: ignore[union-attr]
        return int(epoch), float(update or "inf"), "stopped" in path.name

    return sorted((path for path in folder.glob("*.pt") if NUMBERED.fullmatch(path.name)), key=trained, reverse=True)


def newest(folder: Path) -> Path | None:
    return next(iter(numbered(folder)), None)


def damage(path: Path) -> str:
    """What is wrong with a checkpoint's file, a zip by torch.save; empty if it is whole. Reads the whole file."""
    try:
        with zipfile.ZipFile(path) as archive:
            part = archive.testzip()
            return f"{part} does not match its checksum" if part else ""
    except Exception as error:  # zipfile raises almost anything on damaged content
        if isinstance(error, OSError) and error.filename:
            raise
        return str(error)


def newest_whole(folder: Path) -> Path | None:
    """The checkpoint to go on from. checkpoint_last.pt counts only if no numbered one is whole.

    Raises:
        AdminError: there are checkpoints, and all are damaged.
    """
    damaged: list[str] = []
    for path in (*numbered(folder), *folder.glob("checkpoint_last.pt")):
        if not (fault := damage(path)):
            for other in damaged:
                log.warning("%s. Training goes on from %s.", other, path.name)
            return path
        damaged.append(f"{path} is damaged ({fault})")
    if damaged:
        raise AdminError(f"{damaged[0]}, and no older checkpoint is whole. Copy it again, or remove it to begin again.")
    return None


def reached(checkpoint: Path | None) -> int:
    """The update in a checkpoint's name; 0 without a checkpoint, or for the end of an epoch."""
    match = NUMBERED.fullmatch(checkpoint.name) if checkpoint else None
    return int(match[2] or 0) if match else 0


def furthest(folder: Path, unit: str) -> int:
    """Number of updates or epochs that a run was trained for, by the names of its files."""
    ended, saved = {
        "updates": (r"at-(\d+)(?!-epochs)(-.*)?", r"checkpoint_(?:stopped_)?\d+_(\d+)\.pt"),
        "epochs": (r"at-(\d+)-epochs.*", NUMBERED.pattern),
    }[unit]
    marks = (path.parent for path in folder.glob("at-*/train.log"))
    names = [path.name for path in (*marks, *folder.glob("checkpoints/*.pt"))]
    matches = [match for name in names if (match := re.fullmatch(ended, name) or re.fullmatch(saved, name))]
    return max((int(match[1]) for match in matches), default=0)
