"""Locks of files and folders, and the half-written files of killed processes."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

log = logging.getLogger(__name__)
NOTICE_SECONDS = 1.0
"""Seconds to wait for a lock before it is said who has it."""
NFS_WAIT = 120
"""Seconds until a network file system shows a file that another node has written."""
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of a file system without flock: Lustre mounted without it, NFS without its lock daemon."""
HALVES = re.compile(
    r".+\..*\.\d+\.part(\.\d+)?|(bin|generate\.txt|eval\.txt|omega\.json|model\.pt)\.part|checkpoint.*\.pt\.tmp"
)
"""Names of half-written files and folders of the recipes and of fairseq. No other is removed."""


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Lock `path`: wait until no other process is in such a block, and say which one is.

    The kernel releases the lock when its holder ends. On a file system without such locks, a marker file replaces it.
    The file `path` stays, with the name of its last holder.

    Raises:
        ValueError: another process is, and this one is not to wait.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock: BaseFileLock = FileLock(path, fallback_to_soft=False)
    marker = path.with_name(f".marker{path.name}")
    try:
        try:
            lock.acquire(timeout=NOTICE_SECONDS if wait else 0)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            lock = SoftFileLock(marker)
            lock.acquire(timeout=NOTICE_SECONDS if wait else 0)
    except Timeout:
        holder = path.read_text(encoding="utf-8") or "another process"
        holder += f" (if it is gone, remove {marker})" if isinstance(lock, SoftFileLock) else ""
        if not wait:
            advice = f"{holder} is at work there. Wait for its end or stop it, or write elsewhere with RUNS=."
            raise ValueError(f"{path.parent}: {advice}") from None
        log.info("%s: taken by %s. Waiting for its end.", path, holder)
        lock.acquire()
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        path.write_text(f"process {os.getpid()} on {platform.node()} since {since}", encoding="utf-8")
        yield
    finally:
        lock.release()


def await_files(paths: Iterable[Path]) -> None:
    """Wait for files that another node has written, which a network file system may show later here.

    Raises:
        ValueError: one did not come.
    """
    end = time.monotonic() + NFS_WAIT
    for path in paths:
        while not path.is_file():
            if time.monotonic() > end:
                raise ValueError(
                    f"{path}: another node has it, and this one did not see it in {NFS_WAIT} s; expected a folder that "
                    "all nodes share. Give RUNS= on shared storage."
                )
            time.sleep(1)


def use_environment() -> None:
    """Keep `make setup` from installing into this environment as long as this process runs (set_up.locked).

    Raises:
        ValueError: it is being installed into.
    """
    if not Path(sys.prefix, "ready").exists():
        return
    with suppress(PermissionError):
        descriptor = os.open(Path(sys.prefix, "lock"), os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{sys.prefix} is being set up. Wait for the end of that, and run again.") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise


@contextmanager
def exclusive_folder(folder: Path, node: int = 0, wait: bool = False) -> Iterator[None]:
    """Lock a folder, which other nodes of the same run may share, and remove half-written files there."""
    with locked(folder / f".guard{node or ''}", wait):
        if not node:
            clear(folder)
        yield


def clear(folder: Path) -> None:
    """Remove half-written files in a folder in which no other process works."""
    for path in [path for path in folder.rglob("*.p*") if HALVES.fullmatch(path.name)]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
