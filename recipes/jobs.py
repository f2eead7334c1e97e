"""Jobs: commands that run for a long time, several at once on this machine, or on a cluster (slurm.py).

    for job, status in run([Job("a", ["python", "-m", "recipes.grid.run", ...], folder)], 2, devices=["0", "1"]): ...

A job's output is appended to the file `Job.log`. Jobs on this machine belong to the recipe's process group, and end
with it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

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
        """The last line of its output."""
        if not self.log.exists():  # a cluster may end a job before it begins
            return "no output."
        return "".join(self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:])


def run(jobs: Sequence[Job], parallel: int, devices: Sequence[str]) -> Iterator[tuple[Job, int]]:
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
