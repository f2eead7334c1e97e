"""`python -m recipes status`: which runs there are, how far each is, and who is at work on it.

A run is a folder with a log of its training, anywhere below RUNS.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from recipes.steps.checkpoints import furthest
from recipes.steps.guard import locked


def holder(guard: Path) -> str:
    """The process that has a lock; empty if none has."""
    name = guard.read_text(encoding="utf-8")
    try:
        with locked(guard, wait=False):
            guard.write_text(name, encoding="utf-8")  # its last holder is another than this one
            return ""
    except ValueError:
        return name or "another process"


def state(run: Path) -> str:
    """Whether a run is done, at work, or stopped, and how far it was trained."""
    if worker := next(filter(None, map(holder, sorted(run.glob(".guard*")))), ""):
        return f"at work: {worker}"
    if any((run / name).exists() for name in ("report.html", "result.csv")):
        return "done"
    for unit in ("updates", "epochs"):
        if count := furthest(run, unit):
            return f"stopped after {count} {unit}"
    return "stopped before its first checkpoint"


def lines(words: Sequence[str]) -> Iterator[str]:
    """A line for each run, by folder.

    Args:
        words: RUNS=FOLDER, or none.

    Raises:
        ValueError: there is another word, or no such folder.
    """
    settings = dict(word.partition("=")[::2] for word in words)
    runs = Path(settings.pop("RUNS", "runs"))
    if settings or not runs.is_dir():
        raise ValueError(f"status {' '.join(words)}: expected RUNS= of a folder that is there, and nothing else.")
    folders = {log.parent for log in runs.rglob("train*.log")}
    if not folders:
        yield f"{runs}: no runs yet."
    for run in sorted(folders):
        yield f"{run}: {state(run)}"
