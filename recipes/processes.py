"""How a step does its work: in this process, or by a command of fairseq's; all of it ends with the recipe."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path

from recipes.steps.progress import progress

LOOK = 0.1
"""Seconds between looks whether the work is done, and the make above is still there."""
WATCH = "import os, signal, sys; sys.stdin.read(); os.killpg(0, signal.SIGKILL)"
"""A watcher's program: it reads to the end of what the process that started it holds open, and then ends its group."""


class Failed(ValueError):
    """A command that has said itself what is wrong."""


@contextmanager
def process_group() -> Iterator[subprocess.Popen]:
    """Leads a process group that is killed at the end of the block, and also if this process is killed inside."""
    watcher = subprocess.Popen([sys.executable, "-c", WATCH], stdin=subprocess.PIPE, process_group=0)
    try:
        yield watcher
    finally:
        watcher.communicate()


def _interruptible() -> None:
    """From here on SIGTERM and the end of the terminal interrupt as Ctrl-C does; not where they are ignored, as nohup
    has it."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


def supervise(work: Callable[[], object]) -> int:
    """Do some work in a process group of its own, which ends with this process and with the make above it; its exit
    status, 130 where it was interrupted."""
    parent, child, status = os.getppid(), None, None
    _interruptible()
    with suppress(KeyboardInterrupt), process_group() as group:
        child = multiprocessing.get_context("fork").Process(target=_within, args=(group, work))
        child.start()
        while status is None and (os.getppid() == parent or "MAKELEVEL" not in os.environ):  # a shell may leave
            child.join(LOOK)
            status = child.exitcode
    if status is None:
        if child and child.pid:
            child.join()
        line = "\n" * sys.stderr.isatty()  # after a bar, and the ^C that was typed
        print(f"{line}Interrupted. The same command goes on from here.", file=sys.stderr)
        status = 130
    return status


def _within(group: subprocess.Popen, work: Callable[[], object]) -> None:
    """Do some work in that group; what ends it must be open in its parent alone."""
    os.setpgid(0, group.pid)
    group.stdin.close()  # type: ignore[union-attr]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    work()


def plugin(*words: object) -> str:
    """A verb of fairseq-admin, in this process; what it prints.

    Raises:
        Failed: it has said why.
    """
    from fairseq_admin import cli  # with torch and fairseq, seconds that a recipe with nothing to do can spare

    printed = io.StringIO()
    with redirect_stdout(printed):
        status = cli.main([str(word) for word in words])
    print(printed.getvalue(), end="", flush=True)
    if status:
        raise Failed(f"fairseq-admin {words[0]} ended with status {status}.")
    return printed.getvalue()


def stream(command: list[str], log: Path, mode: str = "ab", accepted: tuple[int, ...] = (0,), **shown: int) -> int:
    """A command of fairseq's, whose output is kept in a file and shown in short; its exit status.

    Args:
        shown: what `progress` is told.

    Raises:
        Failed: it ended with a status that is not accepted.
    """
    said = "nothing said"
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    with process, log.open(mode, buffering=0) as out:

        def lines() -> Iterator[str]:
            for line in process.stdout or ():
                out.write(line)
                yield line.decode("utf-8", "replace")

        try:
            for said in progress(lines(), **shown):
                print(said, flush=True)
        except BaseException:  # nobody reads what is shown, or the disk is full: without its log it is not to go on
            process.kill()
            raise
    if process.returncode not in accepted:
        raise Failed(f"{command[2]} ended with status {process.returncode}: {said} Its whole output: {log}.")
    return process.returncode


def produce(command: list[str], out: Path) -> None:
    """A file of what a command of fairseq's prints, whole or not at all.

    Raises:
        Failed: it ended with another status than 0.
    """
    part = out.with_name(f"{out.name}.part")
    stream(command, part, "wb")
    part.replace(out)
