"""Jobs on a Slurm cluster: scripts for sbatch. Each job begins when the job before it has succeeded (afterok).

A recipe is three jobs: its text, its training, and everything after that. A grid is one job, which makes the text,
submits the runs of the next stage as an array, and submits itself again after them. So no process outside the cluster
has to wait.

If a job is preempted, runs out of time or loses its node, Slurm or the job's script puts it back into the queue. Its
command then starts again and goes on from what it has saved. The path of a script identifies its job, and the script
is in the queue at most once.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, PositiveFloat, PositiveInt

from recipes.machines import BUILDS
from recipes.processes import SCRIPT, Job, Needs
from recipes.recipe import validated
from recipes.steps.common import INTERRUPTED, write_lines
from recipes.steps.guard import locked

log = logging.getLogger(__name__)
POLL_SECONDS = 20
"""Time between queries of the queue."""
WARNING_SECONDS = 300
"""Longest time before the time limit at which Slurm signals a job to save its work."""
MAX_REQUEUES = 1000
"""How often a job that was ended early is put back into the queue."""
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


def queued() -> dict[Path, list[tuple[str, str]]]:
    """The user's jobs in Slurm's queue: the id and state of each job, by the path of its script."""
    scripts: dict[Path, list[tuple[str, str]]] = {}
    for line in output_of("squeue", "--me", "--array", "--noheader", "--format=%F %T %o").splitlines():
        number, state, script = line.split(maxsplit=2)
        scripts.setdefault(Path(script), []).append((number, state))
    return scripts


def submit(path: Path, after: str = "") -> str:
    """Submit a script, which begins once the job `after` has succeeded. Returns the id of the new job."""
    options = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else []
    return output_of("sbatch", "--parsable", *options, path).strip().partition(";")[0]


def make(work: Any, goal: str) -> None:
    """Submit the jobs of a recipe or grid, each to begin after the one before it, unless they are in the queue already.

    With WATCH, wait until all have ended.

    Args:
        work: a `training.Pipeline` or a `grid.grids.Grid`.

    Raises:
        ValueError: Slurm refuses the jobs, or this environment cannot run them; or, with WATCH, a job failed.
        SystemExit: the jobs are submitted, and WATCH is off.
    """
    if not (jobs := work.jobs(goal)):
        return
    if not shutil.which("sbatch"):
        raise ValueError("WHERE=slurm needs sbatch, which is not here. Run this where jobs are submitted from.")
    import torch  # takes seconds, so it is not at the top

    if not (work.on_cpu or goal == "prepare" or torch.version.cuda):
        fault = f"{sys.prefix} has torch {torch.__version__}, a build without CUDA, and the jobs need GPUs"
        raise ValueError(f"{fault}. Take another build: {BUILDS}.")
    slurm, after, ids = read_settings(Path(work.settings.SLURM)), "", []
    with locked(jobs[0].script.parent / ".guard"):
        queue = queued()
        for job in jobs:
            if job.script in queue:
                after, state = queue[job.script][0]
                print(f"job {after}: {job.name}, in the queue already, {state.lower()}", flush=True)
            else:
                write_script(job.script, [job], 0, job.needs, slurm)
                before, after = after, submit(job.script, after)
                print(f"job {after}: {job.name}, {job.needs}{f', after {before}' if before else ''}; output: {job.log}")
            ids.append(after)
    print(f"This shell may end. squeue --me shows the jobs, scancel {' '.join(ids)} ends them, WATCH=1 waits for them.")
    if not work.settings.WATCH:
        raise SystemExit
    watch({job.script for job in jobs})
    for job in jobs:
        print(f"{job.name}: {job.last_line()}", flush=True)
    if not work.is_done(goal):
        raise ValueError(f"Not complete. All output: {', '.join(str(job.log) for job in jobs)}.")


def watch(scripts: Collection[Path]) -> None:
    """Wait until none of the scripts is in the queue, and log how many jobs are in each state."""
    shown = ""
    while states := [state.lower() for path, rows in queued().items() if path in scripts for _, state in rows]:
        text = ", ".join(f"{count} {state}" for state, count in sorted(Counter(states).items()))
        if text != shown:
            log.info("%s  %s", time.strftime("%H:%M:%S"), text)
        shown = text
        time.sleep(POLL_SECONDS)


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
