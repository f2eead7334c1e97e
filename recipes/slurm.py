"""Jobs on a Slurm cluster, by submitit: in arrays, over several nodes, and again where Slurm ends them early.

The ids of the jobs are kept, so a second call waits for those that are still there and does not submit them twice. A
job that is preempted, or that runs out of time, is put back in the queue by submitit; its command then starts again,
and goes on from what it has saved.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pydantic
import submitit
import yaml
from filelock import FileLock
from submitit.helpers import Checkpointable, TorchDistributedEnvironment

from recipes.jobs import Ended, Job, exit_status, interruptible, start
from recipes.steps.common import write_lines

log = logging.getLogger(__name__)
# Seconds between looks at the states, at most. sacct is asked once for all jobs.
LOOK = 60
# The signals that reach every process of a job that Slurm is about to end, and the seconds until then, at most.
EARLY = (signal.SIGTERM, signal.SIGUSR2)
GRACE = 300
# A job that runs out of time goes on so many times.
TIMES = 1000


class Slurm(pydantic.BaseModel, extra="forbid"):
    """A user's slurm.yaml: what this cluster wants to be told. Names and meanings are those of sbatch's options."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    hours: float | None = pydantic.Field(default=None, gt=0, description="a job's time limit, in place of the recipe's")
    memory: float | None = pydantic.Field(default=None, gt=0, description="GB of each node, in place of the recipe's")
    cpus: int | None = pydantic.Field(default=None, gt=0, description="cores for each GPU, or for a job without one")
    setup: list[str] = pydantic.Field(default=[], description="lines of shell before a job, as in: module load cuda")
    options: dict[str, str | int] = pydantic.Field(default={}, description="any other option of sbatch, by name")


def read_settings(path: Path) -> Slurm:
    """The settings in a slurm.yaml; the cluster's own defaults where there is none.

    Raises:
        ValueError: something in it is unknown or wrong.
    """
    try:
        return Slurm(**(yaml.safe_load(path.read_text(encoding="utf-8")) or {}))
    except FileNotFoundError:
        return Slurm()
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise ValueError(f"{path}: {name} is unknown; expected one of {', '.join(Slurm.model_fields)}.") from None
        raise ValueError(f"{path}: {name} is {first['input']!r}; {first['msg']}.") from None
    except (TypeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: cannot be read ({' '.join(str(error).split())}); expected NAME: VALUE.") from None


class Attempt(Checkpointable):
    """What a cluster runs: a job's command, once on each of its nodes. After an early end it is the same again."""

    def __call__(self, job: Job) -> int:
        """The command's exit status."""
        process = start(job, rendezvous(job), group=0)
        try:
            status = exit_status(process.wait())
            if status - 128 in EARLY:
                time.sleep(GRACE)
        finally:
            if process.returncode is None:  # submitit has put the job back in the queue, and ends this process
                os.killpg(process.pid, signal.SIGKILL)
        return status


def rendezvous(job: Job) -> dict[str, str]:
    """Where the processes of a job meet, and which this one is: torch's variables, and a recipe's MASTER and NODE.

    None for a job on one node: fairseq would take its number of processes from them.
    """
    if job.needs.nodes == 1:
        return {}
    place = TorchDistributedEnvironment()
    return {
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "MASTER": f"{place.master_addr}:{place.master_port}",
        "NODE": str(place.rank),
    }


def parameters(job: Job, parallel: int, slurm: Slurm) -> dict[str, Any]:
    """What submitit is told of a job."""
    options = {
        "name": "recipes",
        "nodes": job.needs.nodes,
        "tasks_per_node": 1,
        "timeout_min": round(60 * (slurm.hours or job.needs.hours)),
        "mem_gb": slurm.memory or job.needs.memory,
        "cpus_per_task": slurm.cpus and slurm.cpus * max(1, job.needs.gpus),
        "slurm_gpus_per_node": job.needs.gpus or None,
        "slurm_partition": slurm.partition,
        "slurm_account": slurm.account,
        "slurm_qos": slurm.qos,
        "slurm_constraint": slurm.constraint,
        "slurm_setup": slurm.setup or None,
        "slurm_array_parallelism": parallel,
        "slurm_additional_parameters": slurm.options or None,
        # srun no longer takes these over from sbatch.
        "slurm_srun_args": ["--cpus-per-task", str(slurm.cpus * max(1, job.needs.gpus))] if slurm.cpus else None,
    }
    return {name: value for name, value in options.items() if value is not None}


def submit(jobs: Iterable[Job], parallel: int, slurm: Slurm, folder: Path) -> Iterator[tuple[str, submitit.Job]]:
    """Submit jobs, those with the same needs as one array."""
    alike: dict[Any, list[Job]] = {}
    for job in jobs:
        alike.setdefault(job.needs, []).append(job)
    for several in alike.values():
        executor = submitit.AutoExecutor(folder, cluster="slurm", slurm_max_num_timeout=TIMES)
        executor.update_parameters(**parameters(several[0], parallel, slurm))
        yield from zip([job.name for job in several], executor.map_array(Attempt(), several))


def submitted(jobs: Sequence[Job], parallel: int, slurm: Slurm, folder: Path) -> dict[str, submitit.Job]:
    """The cluster's jobs by name: those from before that are still there, and the others submitted now."""
    ids = folder / "jobs.json"
    with FileLock(folder / ".jobs.lock"):
        known = json.loads(ids.read_text(encoding="utf-8")) if ids.exists() else {}
        before: dict[str, submitit.Job] = {
            job.name: submitit.SlurmJob(folder, known[job.name], range(job.needs.nodes))
            for job in jobs
            if job.name in known
        }
        there = {name: job for name, job in before.items() if not job.done()}
        if there:
            log.info("Waiting for %s of before.", many(len(there)))
        there |= submit([job for job in jobs if job.name not in there], parallel, slurm, folder)
        write_lines(ids, [json.dumps({**known, **{name: job.job_id for name, job in there.items()}}, indent=1)])
    return there


def many(count: int) -> str:
    return f"{count} job{'s' if count != 1 else ''}"


def outcome(name: str, job: submitit.Job) -> int:
    """How a job that is over came out: its highest exit status; 1, and the reason in the log, where it has none."""
    try:
        return max(job.results())
    except (submitit.core.utils.UncompletedJobError, submitit.core.utils.FailedJobError):
        log.info("%s (job %s): %s. Its output: %s", name, job.job_id, job.state, job.paths.stderr)
        return 1


def states(there: dict[str, submitit.Job], waiting: dict[str, submitit.Job]) -> str:
    """As in "2 of 4 jobs over, 1 pending, 1 running"."""
    counts = Counter(job.watcher.get_state(job.job_id, "cache").partition(" ")[0].lower() for job in waiting.values())
    text = f"{len(there) - len(waiting)} of {many(len(there))} over"
    return ", ".join([text, *(f"{count} {state}" for state, count in sorted(counts.items()))])


@interruptible()
def run(
    jobs: Sequence[Job], parallel: int, slurm: Slurm, folder: Path, ended: Ended = lambda job, status: None
) -> dict[str, int]:
    """As recipes.jobs.run, but an interrupt leaves the jobs there; the states are said wherever they change.

    Args:
        slurm: the user's settings of the cluster.
        folder: where a cluster's files are kept, and which jobs it has; every node sees it.

    Returns:
        by name, the exit status of a job's command; 1 if the cluster ended it.
    """
    if not shutil.which("sbatch"):
        raise ValueError("WHERE=slurm needs sbatch, which is not here. Run this where jobs are submitted from.")
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        there = submitted(jobs, parallel, slurm, folder)
    except (subprocess.CalledProcessError, submitit.core.utils.FailedJobError) as error:
        raise ValueError(f"sbatch refused the jobs: {' '.join(str(error).split())}. Look at slurm.yaml.") from None
    numbers = " ".join(sorted({job.job_id.partition("_")[0] for job in there.values()}))
    log.info("Slurm has %s (%s); Ctrl-C leaves them there.", many(len(there)), numbers)
    by_name = {job.name: job for job in jobs}
    said, waiting, statuses, began = "", dict(there), {}, time.monotonic()
    try:
        while waiting:
            submitit.SlurmJob.watcher.update()
            for name in [name for name, job in waiting.items() if job.done()]:
                statuses[name] = outcome(name, waiting.pop(name))
                ended(by_name[name], statuses[name])
            now = states(there, waiting)
            if now != said:
                log.info("%s  %s", time.strftime("%H:%M:%S"), now)
            said = now
            if waiting:
                time.sleep(min(LOOK, 1 + (time.monotonic() - began) / 20))
    except KeyboardInterrupt:
        log.info("The jobs go on. The same command waits for them again; scancel %s ends them.", numbers)
        raise
    return statuses
