"""One process at a time."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

log = logging.getLogger(__name__)
# Seconds that a turn may last without a word to those who wait for it.
SHORT = 1


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait until no other process is in a block of the same path; say who is. A killed process's turn is over.

    The lock is on the file `path`, which stays. Who has it is in a file next to it, which does not: filelock empties
    its own file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock, holder = FileLock(path), path.with_name(f"{path.name}.holder")
    try:
        lock.acquire(timeout=SHORT)
    except Timeout:
        log.info("%s: taken by %s. Waiting for its end.", path, _held_by(holder))
        lock.acquire()
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        holder.write_text(f"process {os.getpid()} on {platform.node()} since {since}", encoding="utf-8")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def _held_by(holder: Path) -> str:
    try:
        return holder.read_text(encoding="utf-8")
    except FileNotFoundError:
        return "another process"
