"""One process at a time: who has a file or a folder, and what a killed one left half-written there."""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

log = logging.getLogger(__name__)
SHORT = 1.0
"""Seconds that a turn may last without a word to those who wait for it."""
HALVES = re.compile(
    r".+\..*\.\d+\.part(\.\d+)?|(bin|generate\.txt|eval\.txt|omega\.json|model\.pt)\.part|checkpoint.*\.pt\.tmp"
)
"""What half-written files and folders are called, by the recipes and by fairseq. No other is removed."""


@contextmanager
def alone(path: Path, wait: bool = True) -> Iterator[None]:
    """Wait until no other process is in a block of the same path; say who is. A killed process's turn is over.

    The lock is on the file `path`, which stays and says who had it last.

    Raises:
        ValueError: another process is, and this one is not to wait.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=SHORT if wait else 0)
    except Timeout:
        holder = path.read_text(encoding="utf-8") or "another process"
        if not wait:
            said = f"{holder} is at work there. Wait for its end or stop it, or write elsewhere with RUNS=."
            raise ValueError(f"{path.parent}: {said}") from None
        log.info("%s: taken by %s. Waiting for its end.", path, holder)
        lock.acquire()
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        path.write_text(f"process {os.getpid()} on {platform.node()} since {since}", encoding="utf-8")
        yield
    finally:
        lock.release()


@contextmanager
def at_work(folder: Path, node: int = 0, wait: bool = False) -> Iterator[None]:
    """Have a folder to oneself, or share it with other nodes of the same run; what is half-written there goes."""
    with alone(folder / f".guard{node or ''}", wait):
        if not node:
            clear(folder)
        yield


def clear(folder: Path) -> None:
    """Remove what is half-written in a folder that nobody else is at work in."""
    for path in [path for path in folder.rglob("*.p*") if HALVES.fullmatch(path.name)]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
