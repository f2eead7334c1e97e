"""The front of the grids, as `make compare NAME=VALUE ...`.

    python -m recipes compare SCHEMES="admin pre-ln" JOBS=2
    python -m recipes compare WHERE=slurm JOBS=8

Interrupt anywhere, run again: it goes on, and what is done is not made again.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes import jobs, slurm
from recipes.grid import texts
from recipes.grid.deeper import Deeper
from recipes.grid.grids import Compare, Grid, Point, Sensitivity, Warmup
from recipes.grid.settings import KINDS, load, names
from recipes.processes import call, supervise
from recipes.recipe import validated
from recipes.steps import gpus, settings
from recipes.steps.common import run
from recipes.steps.guard import at_work
from recipes.steps.progress import duration

GRIDS: dict[str, type[Grid]] = {"compare": Compare, "sensitivity": Sensitivity, "warmup": Warmup, "deeper": Deeper}


def read(target: str, values: dict[str, str]) -> Grid:
    """The grid of a target, with what a user gives for its settings.

    Raises:
        ValueError: a setting is unknown or wrong.
    """
    file, known = load(target), names(target)
    if unknown := next((name for name in values if name not in known), None):
        raise ValueError(f"{unknown}={values[unknown]} is not a setting of {target}. See make help TARGET={target}.")
    preset = values.get("PRESET") or next(iter(file.presets))
    if preset not in file.presets:
        raise ValueError(f"PRESET={preset} is unknown; expected {' or '.join(file.presets)}.")
    quick = file.quick if values.get("QUICK") else {}
    own = {name: value for name, value in values.items() if name != "QUICK"}
    whole = {**file.settings, **file.presets[preset], **quick, **own, "PRESET": preset}
    return GRIDS[target](validated(KINDS[target], whole), values)  # type: ignore[arg-type]


class Front:
    """What makes a grid."""

    def __init__(self, target: str, grid: Grid) -> None:
        self.target, self.grid = target, grid
        self.settings: Any = grid.settings

    def needs(self) -> jobs.Resources:
        return load(self.target).resources(gpus=0 if self.grid.on_cpu else 1)

    def is_done(self, point: Point) -> bool:
        folder = self.grid.folder / point.name
        if (folder / "result.json").exists():
            return True
        spec = folder / "trained.json"
        return point.name == "encoder" and spec.exists() and not json.loads(spec.read_text(encoding="utf-8"))["stopped"]

    def make_runs(self, points: Sequence[Point]) -> None:
        """Those of a stage that have no result yet.

        Raises:
            ValueError: one failed.
        """
        began, folder, s = time.monotonic(), self.grid.folder, self.settings
        wanted = {point.name: point for point in points if not self.is_done(point)}
        done = len(points) - len(wanted)
        here = 0
        if not wanted:
            return
        print(f"{folder}: {len(points)} runs, {done} of them done; {s.JOBS} at a time", flush=True)

        def ended(job: jobs.Job, status: int) -> None:
            nonlocal here
            here += not status
            left = (time.monotonic() - began) / max(here, 1) * (len(wanted) - here)
            message = job.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            text = f"{job.name}: {''.join(message)}; {done + here} of {len(points)} runs done"
            print(text + (f", {duration(left)} left" if here and here < len(wanted) else ""), flush=True)

        for point in wanted.values():
            self.grid.run(point).write(folder / point.name)
        commands = [
            jobs.Job(
                name, [sys.executable, "-m", "recipes.grid.run", str(folder / name)], folder / name, needs=self.needs()
            )
            for name in wanted
        ]
        devices = [] if self.grid.on_cpu else [gpu.index for gpu in gpus.visible()]
        if s.WHERE == "slurm":
            statuses = slurm.run(commands, s.JOBS, slurm.read_settings(Path(s.SLURM)), folder / "slurm", ended)
        else:
            statuses = jobs.run(commands, s.JOBS, devices, ended)
        failed = [name for name in wanted if statuses[name]]
        failed += [name for name in wanted if not statuses[name] and not self.is_done(wanted[name])]
        if failed:
            logs = ", ".join(str(folder / name / "job.log") for name in failed[:3])
            raise ValueError(f"{len(failed)} of {len(wanted)} runs failed; their output: {logs}.")

    def hold(self) -> None:
        """Refuse other settings than those of the folder; without a run of those, its text is made again."""
        folder = self.grid.folder
        text = [folder / name for name in ("text", "bin", "entropy.json")]
        settings.hold(folder / "settings.json", self.grid.record(), text)

    def make(self) -> None:
        """All of it: text, runs, tables and figures."""
        grid = self.grid
        if isinstance(grid, Deeper) or grid.generated:
            self.hold()
            texts.make(grid)
        else:
            texts.make(grid)
            self.hold()
        trial = grid.trial() if isinstance(grid, Compare) else None
        if trial:
            Front(self.target, trial).make()
        points: dict[str, Point] = {}
        for stage in grid.stages():
            self.make_runs(stage)
            points |= {point.name: point for point in stage if point.name != "encoder"}
        results = [grid.folder / name / "result.json" for name in points]
        for module, words in grid.tables(results):
            call(module, *words)
        print((grid.folder / grid.summary[0]).read_text(encoding="utf-8"))
        print(f"Files: {' '.join(str(grid.folder / name) for name in grid.summary)}")

    def plan(self) -> None:
        """The runs, as far as they are known: what is best is not, before there are results."""
        trial = self.grid.trial() if isinstance(self.grid, Compare) else None
        if trial:
            Front(self.target, trial).plan()
        stages = self.grid.stages()
        while True:
            try:
                stage = next(stages)
            except StopIteration:
                return
            except ValueError:
                print("then the best of those, as the results will show")
                return
            for point in stage:
                print(f"{'done' if self.is_done(point) else 'run '}  {self.grid.folder / point.name}")


def main(target: str, values: dict[str, str], dry: bool) -> None:
    """Make a grid with what the user gave for its settings; or list its runs."""
    grid = read(target, values)
    for name, value in grid.settings.exported().items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of fairseq and its libraries about one another
    if grid.on_cpu:
        # With --cpu fairseq still clips gradients on a GPU that it sees, and starts a process for each of several.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    front = Front(target, grid)
    if dry:
        front.plan()
        return

    def work() -> None:
        with at_work(grid.folder):
            front.make()

    if front.settings.WHERE == "here":
        raise SystemExit(supervise(lambda: run(work), grid.folder))
    work()  # a cluster's jobs go on when this process ends
