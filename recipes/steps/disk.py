"""Room on the disk: asked for before a long write, and what to say where it ran out."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from tqdm import tqdm


def size(count: float) -> str:
    """Bytes for people, in powers of 1000."""
    return tqdm.format_sizeof(count, "B")


def room(folder: Path, missing: int | None, purpose: str) -> None:
    """Refuse to begin what the disk cannot hold.

    Args:
        folder: where it will be written.
        missing: bytes to write, if they are known.
        purpose: what they are for, in the message.

    Raises:
        ValueError: there is less room.
    """
    free = shutil.disk_usage(folder).free
    if missing is not None and missing > free:
        raise ValueError(
            f"{folder}: found {size(free)} free, expected {size(missing)} for {purpose}. Make room, or write elsewhere."
        )


def full(folder: Path, error: OSError, missing: int | None = None) -> ValueError:
    """What to say of a write that failed, with so many bytes still to write."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ValueError(f"{error.filename or folder}: {error.strerror or error}. Check the folder.")
    needed = f", expected {size(missing)} more" if missing else ""
    free = size(shutil.disk_usage(folder).free)
    return ValueError(f"{folder}: the disk is full: found {free} free{needed}. Make room, and run again.")
