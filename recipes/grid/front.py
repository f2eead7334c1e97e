"""A grid from start to end: its text, its runs, stage by stage, its tables and figures.

An interrupted grid goes on with the same command, and repeats no finished run. Each run is a process:

    python -m recipes.grid.front TARGET RUN NAME=VALUE ...
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from recipes import jobs, recipe, slurm
from recipes.compare.rows import read_results
from recipes.grid.deeper import Deeper
from recipes.grid.grids import Axes, Grid, Warmup
from recipes.grid.runs import last_change
from recipes.recipe import Recipe
from recipes.steps import gpus
from recipes.steps.common import run
from recipes.steps.guard import locked
from recipes.steps.progress import duration


def of(recipe: Recipe) -> Grid:
    return {"Warmup": Warmup, "Deeper": Deeper}.get(recipe.file.kind, Grid)(recipe)


def result(grid: Grid, axes: Axes) -> Path:
    return grid.folder / grid.name(axes) / "result.csv"


def make_runs(grid: Grid, points: Sequence[Axes]) -> None:
    """Make the runs of a stage that are not done.

    Raises:
        ValueError: a run failed, or a finished run has other settings.
    """
    began, s = time.monotonic(), grid.settings
    done = [axes for axes in points if result(grid, axes).exists()]
    if done:
        text_settings = grid.run(done[0]).text_settings()
        for axes in done:
            grid.run(axes).check_resume(text_settings)
    waiting = [axes for axes in points if axes not in done]
    if not waiting:
        return
    print(f"{grid.folder}: {len(points)} runs, {len(done)} of them done; {s.JOBS} at a time", flush=True)
    command = [sys.executable, "-m", "recipes.grid.front", grid.recipe.target]
    names = [grid.name(axes) for axes in waiting]
    runs = [jobs.Job(name, [*command, name, *grid.recipe.words], grid.folder / name) for name in names]
    if s.WHERE == "slurm":
        needs = replace(grid.recipe.file.needs, gpus=0 if grid.on_cpu else 1)
        ended = slurm.run(runs, needs, s.JOBS, slurm.read_settings(Path(s.SLURM)), grid.folder / "slurm")
    else:
        ended = jobs.run(runs, s.JOBS, [] if grid.on_cpu else [gpu.index for gpu in gpus.visible()])
    failed = []
    for number, (job, status) in enumerate(ended, start=1):
        failed += [job] if status else []
        left = (time.monotonic() - began) / number * (len(waiting) - number)
        text = f"{job.name}: {job.last_line()}; {len(done) + number - len(failed)} of {len(points)} runs done"
        print(f"{text}, {duration(left)} left" if number < len(waiting) else text, flush=True)
    if failed:
        logs = ", ".join(str(job.log) for job in failed[:3])
        raise ValueError(f"{len(failed)} of {len(waiting)} runs failed; their output: {logs}.")


def make(grid: Grid) -> None:
    """Make the whole grid. Refuse settings that differ from those of an existing run."""
    from recipes.figures import grid as figures  # imports scipy and matplotlib

    if protocol := getattr(grid.settings, "PROTOCOL", ""):
        last_change(Path(protocol))
    grid.run(next(grid.points())).make("prepare")
    points: dict[str, Axes] = {}
    for stage in grid.stages():
        make_runs(grid, stage)
        points |= {grid.name(axes): axes for axes in stage if axes}
    rows = read_results(result(grid, axes) for axes in points.values())
    figures.write(grid.folder, rows)
    print((grid.folder / "table.md").read_text(encoding="utf-8"))
    print(f"All tables and figures: {grid.folder}/*.md, *.csv, *.png")


def work(grid: Grid) -> None:
    """Make the whole grid under a lock of its folder. Jobs of a cluster may still be at work in the folders of runs."""
    with locked(grid.folder / ".guard", wait=False):
        make(grid)


def plan(grid: Grid) -> list[str]:
    """A line for each run that is known. The best rate is not known before there are results."""
    lines = []
    try:
        for stage in grid.stages():
            paths = (result(grid, axes) for axes in stage)
            lines += [f"{'done' if path.exists() else 'run '}  {path.parent}" for path in paths]
    except FileNotFoundError:
        lines.append("then the best of those, as the results will show")
    return lines


def main() -> None:
    """Make one run."""
    target, name, *words = sys.argv[1:]
    grid = of(recipe.read(target, dict(word.split("=", 1) for word in words)))
    points: list[Axes] = [{}, *grid.points()]
    grid.run(next(axes for axes in points if grid.name(axes) == name)).work()


if __name__ == "__main__":
    run(main)
