"""What makes a grid: its text, its runs, stage by stage, its tables and figures.

Interrupt anywhere, run again: it goes on, and what is done is not made again.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from recipes import jobs, slurm
from recipes.compare.rows import read_results
from recipes.grid.grids import Compare, Deeper, Grid, Point, Warmup
from recipes.recipe import Recipe
from recipes.steps import gpus, records
from recipes.steps.guard import locked
from recipes.steps.progress import duration

KINDS: dict[str, type[Grid]] = {grid.__name__: grid for grid in (Compare, Warmup, Deeper)}


def of(recipe: Recipe) -> Grid:
    return KINDS.get(recipe.file.kind, Grid)(recipe)


def is_done(grid: Grid, point: Point) -> bool:
    folder = grid.folder / point.name
    if point is not grid.before:
        return (folder / "result.json").exists()
    trained = folder / "trained.json"
    return trained.exists() and not json.loads(trained.read_text(encoding="utf-8"))["stopped"]


def make_runs(grid: Grid, points: Sequence[Point]) -> None:
    """Those of a stage that are not done.

    Raises:
        ValueError: one failed.
    """
    began, folder, s = time.monotonic(), grid.folder, grid.settings
    wanted = {point.name: point for point in points if not is_done(grid, point)}
    count, done = len(points), len(points) - len(wanted)
    if not wanted:
        return
    print(f"{folder}: {count} runs, {done} of them done; {s.JOBS} at a time", flush=True)
    commands = []
    for name, point in wanted.items():
        grid.run(point).write(folder / name)
        commands.append(jobs.Job(name, [sys.executable, "-m", "recipes.grid.run", str(folder / name)], folder / name))
    if s.WHERE == "slurm":
        needs = replace(grid.recipe.file.needs, gpus=0 if grid.on_cpu else 1)
        ended = slurm.run(commands, needs, s.JOBS, slurm.read_settings(Path(s.SLURM)), folder / "slurm")
    else:
        ended = jobs.run(commands, s.JOBS, [] if grid.on_cpu else [gpu.index for gpu in gpus.visible()])
    failed = []
    for number, (job, status) in enumerate(ended, start=1):
        failed += [job] if status or not is_done(grid, wanted[job.name]) else []
        left = (time.monotonic() - began) / number * (len(wanted) - number)
        text = f"{job.name}: {job.last_line()}; {done + number - len(failed)} of {count} runs done"
        print(f"{text}, {duration(left)} left" if number < len(wanted) else text, flush=True)
    if failed:
        logs = ", ".join(str(job.log) for job in failed[:3])
        raise ValueError(f"{len(failed)} of {len(wanted)} runs failed; their output: {logs}.")


def make(grid: Grid) -> None:
    """All of it. Other settings than the folder's are refused, or without a run of those, its text is made again."""
    from recipes.figures import grid as figures  # with scipy and matplotlib

    made_of_it = [grid.folder / name for name in ("text", "bin", "entropy.json")]
    records.check_unchanged(grid.folder / "settings.json", grid.record(), made_of_it)
    grid.make_text()
    if trial := grid.trial():
        make(trial)
    points: dict[str, Point] = {}
    for stage in grid.stages():
        make_runs(grid, stage)
        points |= {point.name: point for point in stage if point is not grid.before}
    rows = read_results(grid.folder / name / "result.json" for name in points)
    figures.write(grid.folder, rows, read_results([trial.folder / "runs.csv"]) if trial else ())
    print((grid.folder / grid.summary).read_text(encoding="utf-8"))
    print(f"All tables and figures: {grid.folder}/*.md, *.csv, *.png")


def work(grid: Grid) -> None:
    """All of it, alone in its folder; in those of its runs jobs of a cluster may still be at work."""
    with locked(grid.folder / ".guard", wait=False):
        make(grid)


def plan(grid: Grid) -> list[str]:
    """The runs, as far as they are known: what is best is not, before there are results."""
    trial = grid.trial()
    lines = plan(trial) if trial else []
    try:
        for stage in grid.stages():
            lines += [f"{'done' if is_done(grid, point) else 'run '}  {grid.folder / point.name}" for point in stage]
    except FileNotFoundError:
        lines.append("then the best of those, as the results will show")
    return lines
