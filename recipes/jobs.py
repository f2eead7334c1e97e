"""Jobs: commands that run for long, side by side on this machine, or on a cluster's (slurm.py).

    for job, status in run([Job("a", ["python", "-m", "recipes.grid.run", ...], folder)], 2, devices=["0", "1"]): ...

What a job says is added to the file that `Job.log` names. Those here are in the process group of the front, and end
with it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import Queue


@dataclass(frozen=True)
class Needs:
    """What a job needs of a cluster. GPUs and GB of memory are each node's; it has one process on each node."""

    gpus: int = 0
    nodes: int = 1
    hours: float = 24
    memory: float | None = None

    def __str__(self) -> str:
        return f"nodes x GPUs: {self.nodes} x {self.gpus}, hours: {self.hours:g}"


@dataclass(frozen=True)
class Job:
    name: str
    command: Sequence[str]
    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / "job.log"

    def last_word(self) -> str:
        """The last line that it said."""
        if not self.log.exists():  # as of a job that a cluster ended before it began
            return "it said nothing."
        return "".join(self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:])


def start(job: Job, env: Mapping[str, str], group: int | None = None) -> subprocess.Popen:
    """Start a job's command, with variables that where it runs adds; 0: in a process group of its own."""
    job.folder.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab") as log:
        return subprocess.Popen(
            job.command, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            process_group=group,
        )  # fmt: skip


def run(jobs: Sequence[Job], parallel: int, devices: Sequence[str]) -> Iterator[tuple[Job, int]]:
    """Run jobs on this machine, so many at a time; each that is over, with its exit status.

    Args:
        devices: this machine's GPUs, as CUDA_VISIBLE_DEVICES names them; a job gets one of them.
    """
    places: Queue[dict[str, str]] = Queue()
    for place in range(parallel):
        places.put({"CUDA_VISIBLE_DEVICES": devices[place % len(devices)]} if devices else {})

    def one(job: Job) -> int:
        place = places.get()
        try:
            return start(job, place).wait()
        finally:
            places.put(place)

    with ThreadPoolExecutor(parallel) as pool:
        started = {pool.submit(one, job): job for job in jobs}
        yield from ((started[future], future.result()) for future in as_completed(started))
