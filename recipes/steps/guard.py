"""One process at a time; and a make that has its run's folder to itself and leaves nothing behind.

    python -m recipes.steps.guard --alone RUN -- make -f recipes/compare/Makefile

runs the command, and ends with its status. Where another one is at work in the folder, it says who and stops; with
--wait it waits. An interrupt, and the end of this process by any other way, end all that the command started. What a
killed command left half-written is removed before and after.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType

from filelock import FileLock, Timeout

from recipes.steps.common import run

log = logging.getLogger(__name__)
# Seconds that a turn may last without a word to those who wait for it.
SHORT = 1
# Seconds between looks whether the make above is still there.
LOOK = 0.1
# What half-written files and folders are called: by `replacing` and `extract`, by the recipes, by fairseq. No other is
# removed.
HALVES = re.compile(
    r".+\..*\.\d+\.part(\.\d+)?|(bin|generate\.txt|eval\.txt|omega\.json|model\.pt)\.part|checkpoint.*\.pt\.tmp"
)
# The environment variable that tells a make and its steps which locks are their own.
OWN = "RECIPES_GUARDS"
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def alone(path: Path, wait: bool = True) -> Iterator[None]:
    """Wait until no other process is in a block of the same path; say who is. A killed process's turn is over.

    The lock is on the file `path`, which stays. Who has it is in a file next to it, which does not: filelock empties
    its own file.

    Raises:
        ValueError: another process is, and this one is not to wait; or the folder cannot be written to.
    """
    lock, holder = FileLock(path), path.with_name(f"{path.name}.holder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=SHORT if wait else 0)
    except Timeout:
        if not wait:
            raise ValueError(
                f"{path.parent}: {_held_by(holder)} is at work there. Wait for its end or stop it, or write elsewhere "
                "with RUNS=."
            ) from None
        log.info("%s: taken by %s. Waiting for its end.", path, _held_by(holder))
        lock.acquire()
    except OSError as error:
        raise ValueError(f"{path}: cannot be made ({error.strerror}). Write elsewhere with RUNS=.") from None
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


def others_in(folder: Path) -> str | None:
    """Who is at work in a folder or below, this process and the makes that it is part of aside; None: nobody."""
    own = os.environ.get(OWN, "").split(os.pathsep)
    for path in sorted(folder.rglob(".guard*")):
        if path.suffix == ".holder" or str(path.absolute()) in own:
            continue
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return f"{path.parent} ({_held_by(path.with_name(f'{path.name}.holder'))})"
        lock.release()
    return None


def clear(folder: Path) -> None:
    """Remove what is half-written in a folder that nobody else is at work in."""
    for path in [path for path in folder.rglob("*.p*") if HALVES.fullmatch(path.name)]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


class Ended(BaseException):
    """This process was told to end, by the signal of that number."""

    def __init__(self, number: int):
        self.number = number


def _end(number: int, frame: FrameType | None) -> None:
    raise Ended(number)


def supervise(work: Callable[[], None]) -> int:
    """Do some work in a process group of its own, which ends with this process; its exit status.

    One that a signal ended has 128 and the number of the signal, as a shell has it.

    Raises:
        Ended: this process was told to end, or the make that started it was killed; the group is no more.
    """
    for number in ENDS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, _end)
    # Before the work begins: whoever waits for its first word may then end the make above.
    parent = os.getppid()
    lifeline, held = os.pipe()
    sys.stdout.flush()
    group = _forked(work, held)
    # It reads to the end of what this process alone holds open.
    watcher = _forked(lambda: _end_with(lifeline, group), held, group)
    status = None
    try:
        while os.getppid() == parent:
            child, status = os.waitpid(group, os.WNOHANG)
            if child:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            status = None
            time.sleep(LOOK)
        raise Ended(signal.SIGHUP)
    finally:
        for number in ENDS:
            signal.signal(number, signal.SIG_IGN)
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        for child in [watcher, *([group] if status is None else [])]:
            os.waitpid(child, 0)
        os.close(held)
        os.close(lifeline)


def _end_with(lifeline: int, group: int) -> None:
    os.read(lifeline, 1)
    os.killpg(group, signal.SIGKILL)


def _forked(work: Callable[[], object], held: int, group: int = 0) -> int:
    """A process of that group, or of one of its own, that does some work and ends; its number."""
    child = os.fork()
    if child:
        with suppress(OSError):  # it has done so itself
            os.setpgid(child, group or child)
        return child
    status = 1
    try:
        os.setpgid(0, group)
        os.close(held)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in ENDS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        work()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(status)


def main() -> None:
    split = sys.argv.index("--")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--alone", type=Path, metavar="FOLDER", help="the folder to have to oneself")
    parser.add_argument("--node", default="", help="the number of one of several machines that share the folder")
    parser.add_argument("--wait", action="store_true", help="wait for one's turn")
    args = parser.parse_args(sys.argv[1:split])

    lock = args.alone / f".guard{args.node}" if args.alone else None
    with alone(lock, args.wait) if lock else nullcontext():
        if lock:
            os.environ[OWN] = os.pathsep.join(filter(None, (os.environ.get(OWN), str(lock.absolute()))))
        whole = args.alone if not args.node else None
        try:
            if whole:
                clear(whole)
            # GNU make hands its job server down in open files.
            status = supervise(lambda: os.execvp(sys.argv[split + 1], sys.argv[split + 1 :]))
        except Ended as ended:
            print("Interrupted. The same command goes on from here.", file=sys.stderr)
            status = 128 + ended.number
        if whole and status:
            clear(whole)
    raise SystemExit(status)


if __name__ == "__main__":
    run(main)
