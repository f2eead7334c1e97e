"""Locks of files and folders, and the removal of half-written files of killed processes."""

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
from contextlib import contextmanager
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

log = logging.getLogger(__name__)
NOTICE_SECONDS = 1.0
"""Seconds to wait for a lock before the log names its holder."""
GLANCE_SECONDS = 0.2
"""Seconds to try for a lock that must be free: `holder` may hold it for a moment."""
NFS_WAIT = 120
"""Seconds to wait until a network file system shows a file of another node."""
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of a file system without flock, such as Lustre mounted without it, or NFS without its lock daemon."""
HALVES = re.compile(
    r".+\..*\.\d+\.part(\.\d+)?|(bin|generate\.txt|eval\.txt|omega\.json|model\.pt)\.part|checkpoint.*\.pt\.tmp"
)
"""Names of half-written files and folders of the recipes and of fairseq. Nothing else is removed."""


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold the lock `path` inside the block. Wait until it is free, and log which process holds it.

    The kernel releases the lock when its holder ends. On a file system without kernel locks, a marker file is the lock.
    The file `path` stays, with the name of its last holder.

    Raises:
        ValueError: another process holds the lock, and `wait` is off.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock: BaseFileLock = FileLock(path, fallback_to_soft=False)
    marker = path.with_name(f".marker{path.name}")
    try:
        try:
            lock.acquire(timeout=NOTICE_SECONDS if wait else GLANCE_SECONDS)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            lock = SoftFileLock(marker)
            lock.acquire(timeout=NOTICE_SECONDS if wait else GLANCE_SECONDS)
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


def holder(path: Path) -> str:
    """The process that holds the lock `path`; empty if the lock is free."""
    name = path.read_text(encoding="utf-8") if path.exists() else ""
    try:
        with locked(path, wait=False):
            path.write_text(name, encoding="utf-8")  # `locked` has written this process's name
            return ""
    except ValueError:
        return name or "another process"


def await_files(paths: Iterable[Path]) -> None:
    """Wait for files that another node has written, which a network file system may show late.

    Raises:
        ValueError: a file did not appear within NFS_WAIT seconds.
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
    """Keep `make setup` from changing this environment as long as this process runs (set_up.locked).

    Raises:
        ValueError: `make setup` is changing the environment.
    """
    if not Path(sys.prefix, "ready").exists():
        return
    try:
        descriptor = os.open(Path(sys.prefix, "lock"), os.O_CREAT | os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{sys.prefix} is being set up. Wait for the end of that, and run again.") from None
    except OSError as error:
        if error.errno not in (*NO_LOCKS, errno.EACCES, errno.EPERM, errno.EROFS):
            raise


@contextmanager
def exclusive_folder(folder: Path, node: int = 0, wait: bool = False) -> Iterator[None]:
    """Lock a folder and remove half-written files in it. Each node of a run has its own lock; node 0 cleans up."""
    with locked(folder / f".guard{node or ''}", wait):
        if not node:
            clear(folder)
        yield


def clear(folder: Path) -> None:
    """Remove half-written files in a folder that no other process writes to."""
    for path in [path for path in folder.rglob("*.p*") if HALVES.fullmatch(path.name)]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
