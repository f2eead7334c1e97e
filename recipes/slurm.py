"""Jobs on a Slurm cluster, by submitit: in arrays, over several nodes, and again where Slurm ends them early.

The ids of the jobs are kept, so a second call waits for those that are still there and does not submit them twice. A
job that is preempted, that runs out of time or whose node fails is put back in the queue, by Slurm or by submitit; its
command then starts again, and goes on from what it has saved. A job is over when Slurm's queue has it no longer.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import submitit
import yaml
from filelock import FileLock
from pydantic import BaseModel, PositiveFloat, PositiveInt
from submitit.core.job_environment import JobEnvironment
from submitit.core.utils import FailedJobError
from submitit.helpers import Checkpointable, DelayedSubmission, TorchDistributedEnvironment

from recipes.chain import Chain
from recipes.jobs import Job, Needs, start
from recipes.steps.common import write_lines
from recipes.training import Pipeline
from recipes.validation import validated

log = logging.getLogger(__name__)
LOOK = 60
"""Seconds between looks at the queue, at most. squeue is asked once for all jobs."""
EARLY, GRACE = (signal.SIGTERM, signal.SIGUSR2), 300
"""The signals that reach every process of a job that Slurm is about to end, and the seconds until then, at most."""
LATE = 3
"""Seconds from the first process that such a signal reaches to the last, at most."""
SEEN = 15
"""Seconds until a network's file system shows what another machine has written, at most."""
TIMES = 1000
"""A job that runs out of time goes on so many times."""


class Slurm(BaseModel, extra="forbid", use_attribute_docstrings=True):
    """A user's slurm.yaml: what this cluster wants to be told. Names and meanings are those of sbatch's options."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    hours: PositiveFloat | None = None
    """a job's time limit, in place of the recipe's"""
    memory: PositiveFloat | None = None
    """GB of each node, in place of the recipe's"""
    cpus: PositiveInt | None = None
    """cores for each GPU, or for a job without one"""
    setup: list[str] = []
    """lines of shell before a job, as in: module load cuda"""
    options: dict[str, bool | str | int] = {}
    """any other option of sbatch, by name; true for one that has no value"""


def read_settings(path: Path) -> Slurm:
    """The settings in a slurm.yaml; the cluster's own defaults where there is none.

    Raises:
        ValueError: something in it is unknown or wrong.
    """
    try:
        return validated(Slurm, (yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None) or {})
    except (TypeError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None


class Attempt(Checkpointable):
    """What a cluster runs: a job's command, once on each of its nodes. After an early end it is the same again."""

    def __call__(self, job: Job) -> int:
        """The command's exit status, as a shell has it: 128 and the signal's number, if a signal ended it. None counts,
        but 0, once Slurm has said that it ends the job."""
        JobEnvironment().paths.result_pickle.unlink(missing_ok=True)  # of an attempt that Slurm ended
        told: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
        process = start(job, rendezvous(), group=0)
        try:
            status = process.wait()
            status = status if status >= 0 else 128 - status
            if status:
                time.sleep(LATE)
            if status - 128 in EARLY or status and told:
                time.sleep(GRACE)
        finally:
            if process.returncode is None:  # submitit has put the job back in the queue, and ends this process
                with suppress(ProcessLookupError):  # the signal ended the command too
                    os.killpg(process.pid, signal.SIGKILL)
        return status

    def checkpoint(self, *args: Any, **kwargs: Any) -> DelayedSubmission:
        """Called before submitit starts scontrol to put the job back. Slurm then ends the job's processes at once, and
        must not end scontrol before it has its answer: what is ignored here, its children ignore."""
        for number in EARLY:
            signal.signal(number, signal.SIG_IGN)
        return super().checkpoint(*args, **kwargs)


def rendezvous() -> dict[str, str]:
    """A recipe's NODE and MASTER: which of a job's nodes this is, and where the first one is reached."""
    place = TorchDistributedEnvironment()
    return {"NODE": str(place.rank), "MASTER": f"{place.master_addr}:{place.master_port}"}


def parameters(needs: Needs, parallel: int, slurm: Slurm) -> dict[str, Any]:
    """What submitit is told of jobs."""
    cpus = slurm.cpus and slurm.cpus * max(1, needs.gpus)
    options = {
        **{f"slurm_{name}": getattr(slurm, name) for name in ("partition", "account", "qos", "constraint", "setup")},
        "name": "recipes",
        "nodes": needs.nodes,
        "tasks_per_node": 1,
        "timeout_min": round(60 * (slurm.hours or needs.hours)),
        "mem_gb": slurm.memory or needs.memory,
        "cpus_per_task": cpus,
        "slurm_gpus_per_node": needs.gpus,
        "slurm_array_parallelism": parallel,
        "slurm_additional_parameters": {"requeue": True, **slurm.options},
        # srun no longer takes these over from sbatch.
        "slurm_srun_args": ["--cpus-per-task", str(cpus)] if cpus else None,
    }
    return {name: value for name, value in options.items() if value}


def queued(*options: str) -> dict[str, str]:
    """The user's jobs in Slurm's queue by id, and in which state each is.

    Raises:
        subprocess.CalledProcessError: Slurm does not answer.
    """
    command = ["squeue", "--me", "--array", "--noheader", "--format=%i %T", *options]
    listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return dict(line.split() for line in listed.splitlines())


def submitted(jobs: Sequence[Job], needs: Needs, parallel: int, slurm: Slurm, folder: Path) -> dict[str, submitit.Job]:
    """The cluster's jobs by name: those from before that are still there, and the others submitted now, as an array."""
    ids = folder / "jobs.json"
    with FileLock(folder / ".jobs.lock"):
        known = json.loads(ids.read_text(encoding="utf-8")) if ids.exists() else {}
        queue = queued()
        there: dict[str, submitit.Job] = {
            job.name: submitit.SlurmJob(folder, known[job.name], range(needs.nodes))
            for job in jobs
            if known.get(job.name) in queue
        }
        if there:
            log.info("Waiting for the jobs of before: %d.", len(there))
        wanted = [job for job in jobs if job.name not in there]
        executor = submitit.AutoExecutor(folder, cluster="slurm", slurm_max_num_timeout=TIMES)
        executor.update_parameters(**parameters(needs, parallel, slurm))
        there |= zip([job.name for job in wanted], executor.map_array(Attempt(), wanted) if wanted else [])
        write_lines(ids, [json.dumps({**known, **{name: job.job_id for name, job in there.items()}}, indent=1)])
    return there


def outcome(name: str, job: submitit.Job) -> int:
    """How a job that is over came out: its highest exit status; 1, and the reason in the log, where it has none."""
    results = [job.task(rank).paths.result_pickle for rank in range(job.num_tasks)]
    end = time.monotonic() + SEEN
    while not (complete := all(path.exists() for path in results)) and time.monotonic() < end:
        time.sleep(1)
    with suppress(FailedJobError):
        if complete:
            return max(job.results())
    state = "gone"
    with suppress(subprocess.CalledProcessError):
        state = queued("--states=all").get(job.job_id, state)  # for some minutes
    log.info("%s (job %s): %s. Its output: %s", name, job.job_id, state, job.paths.stderr)
    return 1


def run(jobs: Sequence[Job], needs: Needs, parallel: int, slurm: Slurm, folder: Path) -> Iterator[tuple[Job, int]]:
    """As recipes.jobs.run, but the end of this process leaves the jobs there; the states are said as they change. A job
    that the cluster ended has the status 1.

    Args:
        slurm: the user's settings of the cluster.
        folder: where a cluster's files are kept, and which jobs it has; every node sees it.
    """
    if not shutil.which("sbatch"):
        raise ValueError("WHERE=slurm needs sbatch, which is not here. Run this where jobs are submitted from.")
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        there = submitted(jobs, needs, parallel, slurm, folder)
    except (subprocess.CalledProcessError, FailedJobError) as error:
        raise ValueError(f"Slurm did not take the jobs: {' '.join(str(error).split())}. Look at slurm.yaml.") from None
    numbers = " ".join(sorted({job.job_id.partition("_")[0] for job in there.values()}))
    log.info("Jobs on Slurm: %d. Ctrl-C leaves them there; scancel %s ends them.", len(there), numbers)
    by_name, waiting, said, began = {job.name: job for job in jobs}, dict(there), "", time.monotonic()
    queue = {job.job_id: "SUBMITTED" for job in there.values()}
    while waiting:
        with suppress(subprocess.CalledProcessError):  # it has said why, and is asked again
            queue = queued()
        for name in [name for name, job in waiting.items() if job.job_id not in queue]:
            yield by_name[name], outcome(name, waiting.pop(name))
        states = Counter(queue[job.job_id] for job in waiting.values())
        counts = [f"{count} {state.lower()}" for state, count in sorted(states.items())]
        now = ", ".join([f"{len(there) - len(waiting)} of {len(there)} over", *counts])
        if now != said:
            log.info("%s  %s", time.strftime("%H:%M:%S"), now)
        said = now
        if waiting:
            time.sleep(min(LOOK, 1 + (time.monotonic() - began) / 20))


def parts(pipeline: Pipeline, goal: str) -> Iterator[tuple[str, Job, Needs]]:
    """The goals of a recipe that are jobs, one after another: the same command again, for its text, its training, and
    what is made of it. The variable NODE tells it that it is on the cluster."""
    recipe, machine = pipeline.recipe, pipeline.machine
    needs, gpus = recipe.file.needs, 0 if machine.cpu else machine.gpus
    needed_by = {"prepare": needs}
    if goal != "prepare":
        needed_by["train"] = replace(needs, nodes=machine.nodes, gpus=gpus)
    if goal not in needed_by:
        needed_by[goal] = replace(needs, gpus=min(1, gpus))
    words = [f"{name}={value}" for name, value in recipe.given.items()]
    for part, needed in needed_by.items():
        target = recipe.target if part == "all" else f"{recipe.target}-{part}"
        yield part, Job(target, [sys.executable, "-m", "recipes", target, *words], recipe.run), needed


def make(pipeline: Pipeline, goal: str) -> None:
    """Those parts of a recipe that are not done.

    Raises:
        ValueError: one failed.
    """
    recipe = pipeline.recipe
    cluster = read_settings(Path(recipe.settings.SLURM))
    for part, job, needs in parts(pipeline, goal):
        if Chain(pipeline.steps()).plan(pipeline.goals[part]):
            print(f"# {job.name}: {needs}; what it says is in {job.log}", flush=True)
            if any(status for _, status in run([job], needs, 1, cluster, recipe.run / "slurm")):
                raise ValueError(f"{job.name}: {job.last_word()} All it said: {job.log}.")
