"""`python -m recipes status`: all runs, how far each was trained, and the process that works on it.

A run is a folder below RUNS that has the log of a training.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from recipes.processes import Job
from recipes.recipe import collect
from recipes.steps.checkpoints import furthest
from recipes.steps.guard import holder


def state(run: Path) -> str:
    """Whether a run is done, at work or stopped; and how far a stopped run was trained."""
    if worker := next(filter(None, map(holder, sorted(run.glob(".guard*")))), ""):
        return f"at work: {worker}"
    resumed = any(run.glob("checkpoints/checkpoint_stopped_*.pt"))  # after its first report, with more UPDATES
    if not resumed and any((run / name).exists() for name in ("report.html", "result.csv")):
        return "done"
    for unit in ("updates", "epochs"):
        if count := furthest(run, unit):
            return f"stopped after {count} {unit}"
    job = Job("", (), run)
    return f"stopped before its first checkpoint{f': {job.last_line()}' if job.log.exists() else ''}"


def lines(words: list[str]) -> Iterator[str]:
    """A line for each run, sorted by folder.

    Args:
        words: RUNS=FOLDER, or nothing.

    Raises:
        ValueError: a word is not RUNS=FOLDER, or the folder does not exist.
    """
    settings = collect("status", words, ["RUNS"])
    if settings.keys() - {"RUNS"}:
        raise ValueError(f"status {' '.join(words)}: expected RUNS=FOLDER, or nothing.")
    runs = Path(settings.get("RUNS") or "runs")
    if words and not runs.is_dir():
        raise ValueError(f"RUNS={runs}: no such folder. Give the recipes' RUNS=; without it, it is runs/.")
    folders = {log.parent for log in runs.rglob("train*.log")}
    if not folders:
        yield f"{runs}: no runs yet."
    for run in sorted(folders):
        yield f"{run}: {state(run)}"
