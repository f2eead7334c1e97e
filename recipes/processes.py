"""Processes of a recipe.

A step works in this process or runs a command of fairseq. Steps and commands end when the recipe ends.

Jobs are commands that run for a long time, several at once on this machine, or on a cluster (slurm.py). A job's output
is appended to the file `Job.log`. Jobs on this machine belong to the recipe's process group, and end with it.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

from fairseq_admin.errors import DIVERGED
from fairseq_admin.outputs import sync
from recipes.steps.common import INTERRUPTED, STOP
from recipes.steps.progress import progress

POLL_SECONDS = 0.1
"""Time between checks whether the work is done, and whether the parent make still runs."""
STOP_SECONDS = 300
"""Time that the work has to end by itself after a signal to stop."""
WATCH = (
    "import os, signal, sys; [signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGUSR2)];"
    "sys.stdin.read(); os.killpg(0, signal.SIGKILL)"
)
"""Program of a watcher process: wait until the parent closes the pipe, or ends, then kill the watcher's group."""


class Failed(ValueError):
    """A command failed, and has printed the reason."""


class Diverged(Failed):
    """A training stopped because it diverged."""


@contextmanager
def process_group() -> Iterator[subprocess.Popen]:
    """The leader of a process group, which is killed at the end of the block, or when this process is killed."""
    watcher = subprocess.Popen([sys.executable, "-c", WATCH], stdin=subprocess.PIPE, process_group=0)
    try:
        yield watcher
    finally:
        watcher.communicate()


def supervise(work: Callable[[], object]) -> int:
    """Do the work in a new process group, which ends with this process and with the parent make.

    Ctrl-C, SIGTERM, SIGUSR2 and a closed terminal (not under nohup) ask the work to stop; this function then waits for
    its end. A second Ctrl-C kills the work.

    Returns:
        The exit status of the work, or INTERRUPTED.
    """
    parent, status = os.getppid(), None
    for number in (*STOP, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    with suppress(KeyboardInterrupt), process_group() as group:
        child = multiprocessing.get_context("fork").Process(target=_within, args=(group, work))
        child.start()
        with suppress(KeyboardInterrupt):
            # If the parent is make, the work ends when make ends. If it is a shell, the work goes on without it.
            while status is None and (os.getppid() == parent or "MAKELEVEL" not in os.environ):
                child.join(POLL_SECONDS)
                status = child.exitcode
        if status is None:
            status = _stop(child, group.pid)
    if status in (None, INTERRUPTED):
        line = "\n" * sys.stderr.isatty()  # the message starts below a progress bar and the ^C
        print(f"{line}Interrupted. The same command goes on from here.", file=sys.stderr)
        return INTERRUPTED
    return status


def _stop(child: multiprocessing.process.BaseProcess, group: int) -> int:
    """Ask all processes of the group to stop. Returns 0 if the child has completed its work, otherwise INTERRUPTED."""
    for number in (*STOP, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.killpg(group, signal.SIGUSR2)
    child.join(2)
    if child.exitcode is None:
        print("Stopping: a training writes a checkpoint first. Ctrl-C again stops it now.", file=sys.stderr)
        child.join(STOP_SECONDS)
    return INTERRUPTED if child.exitcode != 0 else 0


def _within(group: subprocess.Popen, work: Callable[[], object]) -> None:
    """Do the work in that group. Only the parent may hold the watcher's pipe open."""
    os.setpgid(0, group.pid)
    group.stdin.close()  # type: ignore[union-attr]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    work()


@contextmanager
def passing_on(process: subprocess.Popen) -> Iterator[list[int]]:
    """Inside the block, forward stop signals to the other process. Yields the list of those that came."""
    came: list[int] = []

    def pass_on(number: int, _: Any) -> None:
        came.append(number)
        process.send_signal(signal.SIGUSR2)

    earlier = [(number, signal.signal(number, pass_on)) for number in STOP]
    try:
        yield came
    finally:
        for number, handler in earlier:
            signal.signal(number, handler)


def plugin(*words: object) -> str:
    """Run a verb of fairseq-admin in this process. Returns its output.

    Raises:
        Failed: the verb failed, and has printed the reason.
        KeyboardInterrupt: it was asked to stop.
    """
    from fairseq_admin import cli  # imports torch and fairseq, which takes seconds

    printed = io.StringIO()
    with redirect_stdout(printed):
        status = cli.main([str(word) for word in words])
    print(printed.getvalue(), end="", flush=True)
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    if status:
        raise Failed(f"fairseq-admin {words[0]} ended with status {status}.")
    return printed.getvalue()


def stream(command: list[str], log: Path, mode: str = "ab", **shown: Any) -> None:
    """Run a command of fairseq, write its output to a file, and show a short form of it.

    Args:
        shown: arguments of `progress`.

    Raises:
        Failed: the command ended with a status other than 0.
        KeyboardInterrupt: the command was asked to stop.
    """
    last_line = "nothing said"
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    with process, passing_on(process) as signals, log.open(mode, buffering=0) as out:

        def lines() -> Iterator[str]:
            for line in process.stdout or ():
                out.write(line)
                yield line.decode("utf-8", "replace")

        try:
            for line in progress(lines(), **shown):
                print(line, flush=True)
                last_line = line.strip() or last_line
        except BaseException:  # the reader of our output is gone, or the disk is full: do not go on without a log
            process.kill()
            raise
    if signals or process.returncode in (INTERRUPTED, *(-number for number in STOP)):
        raise KeyboardInterrupt
    if process.returncode == -signal.SIGKILL:
        last_line = "it was killed, as the system does when memory runs out."
    if process.returncode:
        failure = Diverged if process.returncode == DIVERGED else Failed
        raise failure(f"{command[2]} ended with status {process.returncode}: {last_line} Its whole output: {log}.")


def produce(command: list[str], out: Path, sentences: int = 0) -> None:
    """Write the output of a command of fairseq to a file, completely or not at all.

    Args:
        sentences: number of sentences to translate; 0 for a command that does not translate.

    Raises:
        Failed: the command ended with a status other than 0. Its output is in a .log next to the file.
    """
    log = out.with_suffix(".log")
    out.parent.mkdir(parents=True, exist_ok=True)
    stream(command, log, "wb", sentences=sentences)
    sync(log)
    log.rename(out)


# -- jobs -------------------------------------------------------------------------------------------------------

SCRIPT = "RECIPES_SLURM_SCRIPT"
"""Environment variable of a cluster's job: the path of the job's script."""


def in_cluster_job() -> bool:
    return SCRIPT in os.environ


@dataclass(frozen=True)
class Needs:
    """What a job needs of a cluster and of the disk. GPUs, cores and GB of memory are per node; a node has one task."""

    gpus: int = 0
    nodes: int = 1
    hours: float = 24
    memory: float | None = None
    cpus: int = 1
    """cores of the workers that make text; a GPU comes with its own cores"""
    text: float = 11
    """bytes of text made from one byte of archives: raw text, words, splits, BPE tokens and binary data"""

    def __str__(self) -> str:
        return f"nodes x GPUs: {self.nodes} x {self.gpus}, hours: {self.hours:g}"


@dataclass(frozen=True)
class Job:
    name: str
    command: Sequence[str]
    folder: Path
    needs: Needs = Needs()

    @property
    def script(self) -> Path:
        """The job's script on a cluster."""
        return self.folder.absolute() / f"slurm/{self.name}.sh"

    @property
    def log(self) -> Path:
        return self.folder / "job.log"

    def last_line(self) -> str:
        """The last line of its output. Slurm's own lines, which follow the program's, do not count."""
        if not self.log.exists():  # a cluster may end a job before it begins
            return "no output."
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return next((line for line in reversed(lines) if not line.startswith(("srun: ", "slurmstepd: "))), "no output.")


def run_jobs(jobs: Sequence[Job], parallel: int, devices: Sequence[str]) -> Iterator[tuple[Job, int]]:
    """Run jobs on this machine, `parallel` at a time. Yields each job when it has ended, with its exit status.

    Args:
        devices: this machine's GPUs, as CUDA_VISIBLE_DEVICES names them. Each job gets one.
    """
    places: Queue[dict[str, str]] = Queue()
    for place in range(parallel):
        places.put({"CUDA_VISIBLE_DEVICES": devices[place % len(devices)]} if devices else {})

    def one(job: Job) -> int:
        place = places.get()
        job.folder.mkdir(parents=True, exist_ok=True)
        try:
            with job.log.open("ab") as log:
                return subprocess.run(
                    job.command, env={**os.environ, **place}, stdin=subprocess.DEVNULL, stdout=log,
                    stderr=subprocess.STDOUT,
                ).returncode  # fmt: skip
        finally:
            places.put(place)

    with ThreadPoolExecutor(parallel) as pool:
        started = {pool.submit(one, job): job for job in jobs}
        try:
            yield from ((started[future], future.result()) for future in as_completed(started))
        except BaseException:  # interrupted: the running jobs got the signal, too; no other job begins
            pool.shutdown(wait=False, cancel_futures=True)
            raise
