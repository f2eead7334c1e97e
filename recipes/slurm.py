"""Jobs on a Slurm cluster: scripts for sbatch. Each job begins when the job before it has succeeded (afterok).

A recipe is three jobs: its text, its training, and everything after that. A grid is one job, which makes the text,
submits the runs of the next stage as an array, and submits itself again after them. So no process outside the cluster
has to wait.

If a job is preempted, runs out of time or loses its node, Slurm or the job's script puts it back into the queue. Its
command then starts again and goes on from what it has saved. The path of a script identifies its job, and the script
is in the queue at most once.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel, PositiveFloat, PositiveInt

from recipes.machines import BUILDS
from recipes.processes import SCRIPT, Job, Needs
from recipes.settings import validated
from recipes.steps.common import INTERRUPTED, write_lines
from recipes.steps.guard import locked

WARNING_SECONDS = 300
"""Longest time before the time limit at which Slurm signals a job to save its work."""
MAX_REQUEUES = 1000
"""How often a job that was ended early is put back into the queue."""
LIMIT = re.compile(r"Partition\w*(Config|Limit)|PerJob")
"""Reasons for which Slurm never begins a job."""
LOADERS = 2
"""Processes that load batches for each GPU (fairseq's --num-workers)."""
BODY = """
export {marker}={script} SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
export MASTER="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):$((20000 + SLURM_JOB_ID % 20000))"
commands=({commands})
logs=({logs})
exec >> "${{logs[${{SLURM_ARRAY_TASK_ID:-0}}]}}" 2>&1
status=0
eval "srun --kill-on-bad-exit=1 ${{commands[${{SLURM_ARRAY_TASK_ID:-0}}]}}" || status=$?
# The work was asked to stop, and is saved. After scancel, the state of the job is not RUNNING.
if [ $status = {interrupted} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {requeues} ] \\
    && [ "$(squeue --noheader --job "$SLURM_JOB_ID" --format %T)" = RUNNING ]; then
  trap "" TERM    # Slurm ends this job's processes as soon as it is asked, and scontrol is one of them
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
"""


class Slurm(BaseModel, extra="forbid", use_attribute_docstrings=True):
    """The user's slurm.yaml: the settings of the cluster, named after sbatch's options."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    hours: PositiveFloat | None = None
    """time limit of a job, instead of the recipe's"""
    memory: PositiveFloat | None = None
    """GB of each node, instead of the recipe's"""
    cpus: PositiveInt | None = None
    """cores for each GPU, or for a job without GPUs, instead of the recipe's"""
    setup: list[str] = []
    """lines of shell before a job, as in: module load cuda"""
    options: dict[str, bool | str | int] = {}
    """any other options of sbatch, by name; true for an option without a value"""


def settings_of(where: str) -> Slurm:
    """The cluster's settings: WHERE=slurm reads slurm.yaml, WHERE=FILE.yaml that file."""
    return read_settings(Path("slurm.yaml" if where == "slurm" else where))


def read_settings(path: Path) -> Slurm:
    """Read a slurm.yaml. Without the default file, the cluster's defaults hold.

    Raises:
        ValueError: a setting in the file is unknown or invalid.
        FileNotFoundError: there is no file of the name that the user gave.
    """
    try:
        text = path.read_text(encoding="utf-8") if path.exists() or path != Path("slurm.yaml") else ""
        return validated(Slurm, yaml.safe_load(text) or {})
    except (TypeError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None


def sbatch_options(needs: Needs, slurm: Slurm) -> dict[str, object]:
    """sbatch's options for a job."""
    minutes = round(60 * (slurm.hours or needs.hours))
    memory = slurm.memory or needs.memory
    options = {
        **{name: getattr(slurm, name) for name in ("partition", "account", "qos", "constraint")},
        "nodes": needs.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": slurm.cpus * max(1, needs.gpus) if slurm.cpus else max(needs.cpus, needs.gpus * (1 + LOADERS)),
        "gpus-per-node": needs.gpus,
        "mem": memory and f"{round(memory * 1024)}M",
        "time": minutes,
        "signal": f"USR2@{min(WARNING_SECONDS, 15 * minutes)}",
        "requeue": True,
        "open-mode": "append",
        **slurm.options,
    }
    return {name: value for name, value in options.items() if value}


def write_script(path: Path, jobs: Sequence[Job], parallel: int, needs: Needs, slurm: Slurm) -> None:
    """Write a script for sbatch. It runs one job (parallel=0), or an array of jobs, `parallel` of them at a time."""
    options = {"job-name": path.stem, "output": path.with_suffix(".out"), "chdir": Path.cwd()}
    options |= {"array": f"0-{len(jobs) - 1}%{parallel}"} if parallel else {}
    lines = [
        "#SBATCH --" + (name if value is True else f"{name}={shlex.quote(str(value))}")
        for name, value in {**options, **sbatch_options(needs, slurm)}.items()
    ]
    for job in jobs:
        job.folder.mkdir(parents=True, exist_ok=True)
    body = BODY.format(
        marker=SCRIPT, script=shlex.quote(str(path)), interrupted=INTERRUPTED, requeues=MAX_REQUEUES,
        commands=" ".join(shlex.quote(shlex.join(job.command)) for job in jobs),
        logs=" ".join(shlex.quote(str(job.log.absolute())) for job in jobs),
    )  # fmt: skip
    write_lines(path, ["#!/bin/bash", *lines, *slurm.setup, *body.splitlines()])


def output_of(*command: str | Path) -> str:
    """The output of one of Slurm's commands.

    Raises:
        ValueError: the command failed.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{command[0]}: {' '.join(done.stderr.split())}. Check slurm.yaml, and that Slurm answers.")
    return done.stdout


class Entry(NamedTuple):
    """A job in Slurm's queue. `reason` says why it waits or why it ended; `after` is its dependency."""

    number: str
    state: str
    reason: str
    after: str

    def __str__(self) -> str:
        state = self.state.lower().replace("_", " ")
        return state if self.reason == "None" else f"{state} ({self.reason})"

    def end(self, job: Job) -> str:
        """How the job ended: its own last line, after Slurm's state unless it succeeded."""
        if self.reason == "DependencyNeverSatisfied":
            return f"cancelled, since job {''.join(re.findall('[0-9]+', self.after)[:1])} failed"
        return job.last_line() if self.state == "COMPLETED" else f"job {self.number} {self}: {job.last_line()}"


def queued(*options: str) -> dict[Path, list[Entry]]:
    """The user's jobs in Slurm's queue, by the path of their script. With --states=all, also those that have ended.

    Slurm forgets a job some time after its end, usually five minutes.
    """
    scripts: dict[Path, list[Entry]] = {}
    for line in output_of("squeue", "--me", "--array", "--noheader", "--format=%F|%T|%r|%E|%o", *options).splitlines():
        *cells, script = line.split("|", 4)
        scripts.setdefault(Path(script), []).append(Entry(*cells))
    return scripts


def submit(path: Path, after: str = "") -> str:
    """Submit a script, which begins once the job `after` has succeeded. Returns the id of the new job."""
    options = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else []
    return output_of("sbatch", "--parsable", *options, path).strip().partition(";")[0]


def make(work: Any, goal: str) -> None:
    """Submit the jobs of a recipe or grid, each to begin after the one before it, unless they are in the queue already.

    Of a job that was submitted before, say how it ended.

    Args:
        work: a `training.Run` or a grid.

    Raises:
        ValueError: Slurm refuses the jobs, or this environment cannot run them.
        SystemExit: the jobs are submitted.
    """
    if not (jobs := work.jobs(goal)):
        return
    if not shutil.which("sbatch"):
        raise ValueError("WHERE= needs sbatch, which is not here. Run this where jobs are submitted from.")
    import torch  # takes seconds, so it is not at the top

    if not (work.on_cpu or goal == "prepare" or torch.version.cuda):
        fault = f"{sys.prefix} has torch {torch.__version__}, a build without CUDA, and the jobs need GPUs"
        raise ValueError(f"{fault}. Take another build: {BUILDS}.")
    slurm, after, ids = settings_of(work.settings.WHERE), "", []
    with locked(jobs[0].script.parent / ".guard"):
        queue, ended = queued(), queued("--states=all")
        for job in jobs:
            if job.script in queue:
                after = queue[job.script][0].number
                print(f"job {after}: {job.name}, in the queue already, {queue[job.script][0]}", flush=True)
            else:
                if last := max(ended.get(job.script, []), key=lambda entry: int(entry.number), default=None):
                    print(f"{job.name}: {last.end(job)}")
                write_script(job.script, [job], 0, job.needs, slurm)
                before, after = after, submit(job.script, after)
                needs = replace(job.needs, hours=slurm.hours or job.needs.hours)
                print(f"job {after}: {job.name}, {needs}{f', after {before}' if before else ''}; output: {job.log}")
            ids.append(after)
    print(f"This shell may end. squeue --me shows the jobs, scancel {' '.join(ids)} ends them.")
    print(states({job.script for job in jobs}), flush=True)
    raise SystemExit


def states(scripts: Collection[Path]) -> str:
    """How many jobs of the scripts are in each state, and why they wait; empty if none is in the queue."""
    entries = [entry for path, rows in queued().items() if path in scripts for entry in rows]
    text = ", ".join(f"{count} {state}" for state, count in sorted(Counter(map(str, entries)).items()))
    if above := [entry.number for entry in entries if LIMIT.search(entry.reason)]:
        text += (
            f". Slurm never begins job {above[0]}, since its partition or account allows less: give other hours:, "
            f"partition: or account: in slurm.yaml, or fewer NODES=, scancel {above[0]}, and run again"
        )
    return text


def run(jobs: Sequence[Job], needs: Needs, parallel: int, slurm: Slurm, folder: Path) -> Iterator[tuple[Job, int]]:
    """Inside a grid's job: submit runs as an array, `parallel` at a time; submit this job again after them; end it.

    Args:
        slurm: the user's settings of the cluster.
        folder: for the scripts and Slurm's messages, on storage that all nodes share.

    Raises:
        ValueError: the runs are in the queue already.
        SystemExit: the jobs are submitted.
    """
    path = folder.absolute() / "runs.sh"
    if path in queued():
        raise ValueError(f"{path} is in the queue already. Wait for its end, or scancel it.")
    write_script(path, jobs, parallel, needs, slurm)
    number = submit(path)
    again = submit(Path(os.environ[SCRIPT]), number)
    print(f"job {number}: {len(jobs)} runs, {needs}; then job {again}, which goes on with the grid", flush=True)
    raise SystemExit
