"""Jobs: commands that run for long, side by side on this machine or on a cluster's.

    run([Job("a", ["python", "-m", "recipes.steps.train", ...], folder)], parallel=2, devices=["0", "1"])

Here each job has a device to itself, and all end with this process, however it ends. slurm.py runs them on a cluster,
where they stay. What a job says is added to the file that `Job.log` names, in both cases.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

# Seconds between looks at the jobs here.
LOOK = 0.1
# A watcher's program: it reads to the end of what the process that started it holds open, and then ends its group.
WATCH = "import os, signal, sys; sys.stdin.read(); os.killpg(0, signal.SIGKILL)"


@dataclass(frozen=True)
class Resources:
    """What a job needs of a cluster. GPUs and memory are each node's; over several nodes it has one process on each."""

    gpus: int = 0
    nodes: int = 1
    hours: float = 24
    memory: float | None = None
    """In GB; None: what the cluster gives."""


@dataclass(frozen=True)
class Job:
    name: str
    command: Sequence[str]
    folder: Path
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of its environment besides ours."""
    needs: Resources = Resources()

    @property
    def log(self) -> Path:
        return self.folder / "job.log"


Ended = Callable[[Job, int], None]


def start(job: Job, env: Mapping[str, str], group: int) -> subprocess.Popen:
    """Start a job's command.

    Args:
        env: variables that where it runs adds.
        group: the process group to be part of; 0: one of its own.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab") as log:
        return subprocess.Popen(
            job.command, env={**os.environ, **job.env, **env}, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, process_group=group,
        )  # fmt: skip


def exit_status(returned: int) -> int:
    """As a shell has it: 128 and the signal's number, if a signal ended the process."""
    return returned if returned >= 0 else 128 - returned


@contextmanager
def process_group() -> Iterator[int]:
    """A process group that is killed at the end of the block, and also if this process is killed inside."""
    watcher = subprocess.Popen([sys.executable, "-c", WATCH], stdin=subprocess.PIPE, process_group=0)
    try:
        yield watcher.pid
    finally:
        watcher.communicate()


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, SIGTERM and the end of the terminal interrupt as Ctrl-C does."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(
    jobs: Sequence[Job],
    parallel: int = 1,
    devices: Sequence[str] = (),
    ended: Ended = lambda job, status: None,
) -> dict[str, int]:
    """Run jobs on this machine to their end.

    Args:
        parallel: how many at a time.
        devices: this machine's GPUs, as CUDA_VISIBLE_DEVICES names them; a job gets one of them.
        ended: called with each job that is over, and its exit status.

    Returns:
        by name, the exit status of a job's command, as a shell has it.

    Raises:
        KeyboardInterrupt: by Ctrl-C, SIGTERM or SIGHUP. No job is left.
    """
    places = list(range(parallel))
    waiting = list(jobs)
    running: dict[int, tuple[Job, subprocess.Popen]] = {}
    statuses: dict[str, int] = {}
    with interruptible(), process_group() as group:
        while waiting or running:
            for place in [place for place in places if place not in running][: len(waiting)]:
                job = waiting.pop(0)
                device = {"CUDA_VISIBLE_DEVICES": devices[place % len(devices)]} if devices else {}
                running[place] = job, start(job, device, group)
            time.sleep(LOOK)
            for place, (job, process) in list(running.items()):
                status = process.poll()
                if status is not None:
                    del running[place]
                    statuses[job.name] = exit_status(status)
                    ended(job, statuses[job.name])
    return statuses
