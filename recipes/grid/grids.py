"""A grid of runs: its axes, the order of its runs, the recipe of each run, and the whole grid from start to end.

The grid's YAML file has the axes, and the options of all runs. A run is an ordinary run of a recipe, with its text. An
interrupted grid goes on with the same command, and repeats no finished run.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fairseq_admin.method.schemes import SCHEMES
from recipes import recipe as recipes
from recipes import slurm
from recipes.grid import texts
from recipes.grid.runs import GENERATE_ARGS, GridRun, TranslationRun, last_change
from recipes.machines import visible_gpus
from recipes.processes import Job, run_jobs
from recipes.recipe import Recipe, validated
from recipes.research.ranking import rankings
from recipes.research.rows import read_results
from recipes.steps.guard import locked

Axes = dict[str, str]
"""A run's value on each axis of the grid."""
NAMED = {"layers": "{}l", "warmup": "w{}", "lr": "lr{}", "beta2": "b{}", "seed": "s{}"}
"""Formats of the values in a run's name. A value without a format stands for itself."""
TEXTS = {"cpu": "own", "gpu": "demo", "multi30k": "multi30k", "quick": "own"}
"""The recipe of a grid's runs, by preset. The text of `own` is generated."""
SETTINGS = {"scheme": "METHOD", "layers": "LAYERS", "lr": "LR", "warmup": "WARMUP", "seed": "SEED"}
"""Axes that are settings of the recipe."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"--optimizer": "adam"},
    "sgd": {"--optimizer": "sgd", "--momentum": 0, "--adam-betas": None},
}


class Grid:
    """A grid of models that translate a generated text, or the text of a recipe."""

    run_type: type[GridRun] = TranslationRun

    def __init__(self, recipe: Recipe) -> None:
        s, file, user_values = recipe.settings, recipe.file, recipe.user_values
        self.recipe, self.settings = recipe, s
        usual = {name: field.default for name, field in file.model.model_fields.items()} | file.values("", s.PRESET)
        changed = [name for name in file.named if name in user_values and getattr(s, name) != usual[name]]
        parts = [recipe.target, *(file.named[name].format(user_values[name]) for name in changed)]
        self.folder = Path(s.RUNS, "-".join([*parts, *([s.PRESET] if s.PRESET != "cpu" else [])]))
        self.on_cpu = s.PRESET != "gpu" or "--cpu" in s.TRAIN_ARGS
        self.patience = getattr(s, "PATIENCE", None) or s.UPDATES
        """A run ends early after so many updates without improvement."""

    # -- the runs ----------------------------------------------------------------------------------------------------

    def name(self, axes: Axes) -> str:
        return "-".join(NAMED.get(axis, "{}").format(value) for axis, value in axes.items())

    def result(self, axes: Axes) -> Path:
        return self.folder / self.name(axes) / "result.csv"

    def points(self) -> Iterator[Axes]:
        """All runs, seed by seed. So, if a grid is stopped, its finished seeds have every scheme and rate."""
        *axes, seeds = (getattr(self.settings, name) for name in self.recipe.file.axes.values())
        for seed, *values in itertools.product(seeds, *axes):
            yield dict(zip(self.recipe.file.axes, map(str, [*values, seed])))

    def stages(self) -> Iterator[list[Axes]]:
        """The runs, stage by stage. With SEARCH=first, the last stage depends on the results of the first seed."""
        points = list(self.points())
        if self.settings.SEARCH == "every":
            yield points
            return
        first = str(self.settings.SEEDS[0])
        tried = [axes for axes in points if axes["seed"] == first]
        yield tried
        best = {(one.scheme, one.layers, one.best) for one in rankings(read_results(map(self.result, tried)))}
        yield [
            axes for axes in points if axes["seed"] != first and (axes["scheme"], axes["layers"], axes["lr"]) in best
        ]

    def run(self, axes: Axes) -> GridRun:
        return self.run_type(self, axes)

    def recipe_of(self, axes: Axes) -> Recipe:
        """The recipe of a run: the grid's settings, the run's values on the axes, and no averaging."""
        s, target = self.settings, TEXTS[self.settings.PRESET]
        file, _ = recipes.files()[target]
        values = file.values("", "cpu") | {"INIT": "reference"} | self.shared({*file.names} - {"PAIRS", "WHERE"})
        values |= {SETTINGS[axis]: value for axis, value in axes.items() if axis in SETTINGS}
        if SCHEMES[axes["scheme"]].ffn is None:  # the scheme sets its own feed-forward weights
            values["FFN_INIT"] = "xavier"
        if target != "multi30k" and s.DATA:
            raise ValueError(f"DATA={s.DATA} with PRESET={s.PRESET}: the text is generated. Leave DATA= out.")
        if target == "own":
            text = texts.reversed_text(self.folder, (s.PAIRS, s.VALID_PAIRS, s.TEST_PAIRS), s.WORDS)
            values |= {"DATA": str(text), "PAIR": "a-b", "TOKENISER": "", "MERGES": 10 * s.WORDS}
        values |= {"PRESET": "cpu", "DEVICE": "gpu" if s.PRESET == "gpu" else "cpu", "AVERAGE": 1}
        settings = validated(file.model, values | {"GENERATE_ARGS": GENERATE_ARGS})
        file = file.model_copy(update={"options": file.options | self.options(axes)})
        return Recipe(target, file, settings, grid=self.folder, point=self.name(axes))

    def shared(self, names: Iterable[str]) -> dict[str, Any]:
        """The grid's settings with these names, without empty values."""
        return {name: value for name, value in self.settings if name in names and value not in (None, "", ())}

    def listed(self, *groups: str) -> dict[str, Any]:
        """The options in some groups of the grid's YAML file."""
        values = {"FFN": 4 * self.settings.WIDTH, **dict(self.settings)}
        options = {name: value for group in groups for name, value in self.recipe.file.options[group].items()}
        return {name: value if value is None else str(value).format(**values) for name, value in options.items()}

    def options(self, axes: Axes) -> dict[str, Any]:
        """fairseq's options of a run that are not settings of its recipe. A value of None removes a recipe's option."""
        betas = {"--adam-betas": f"(0.9, {axes['beta2']})"} if "beta2" in axes else {}
        return self.listed("all") | betas | OPTIMIZERS.get(axes.get("optimizer", ""), {})

    # -- the whole grid ----------------------------------------------------------------------------------------------

    def jobs(self, goal: str) -> list[Job]:
        """The cluster job that makes the grid: it submits the runs."""
        command = [sys.executable, "-m", "recipes", self.recipe.target, *self.recipe.words]
        return [Job(self.recipe.target, command, self.folder, self.recipe.file.needs)]

    def is_done(self, goal: str) -> bool:
        return (self.folder / "table.md").exists()

    def plan(self, goal: str) -> list[str]:
        """A line for each run that is known. The best rate is not known before there are results."""
        lines = []
        try:
            for stage in self.stages():
                paths = map(self.result, stage)
                lines += [f"{'done' if path.exists() else 'run '}  {path.parent}" for path in paths]
        except FileNotFoundError:
            lines.append("then the best of those, as the results will show")
        return lines

    def make(self, goal: str) -> None:
        """Make the whole grid under a lock of its folder. Jobs of a cluster may still be at work in folders of runs.

        Raises:
            ValueError: a run failed, or a finished run has other settings.
        """
        with locked(self.folder / ".guard", wait=False):
            self._make()

    def _make(self) -> None:
        from recipes.research import drawing  # imports matplotlib

        if protocol := getattr(self.settings, "PROTOCOL", ""):
            last_change(Path(protocol))
        self.run(next(self.points())).make("prepare")
        points: dict[str, Axes] = {}
        for stage in self.stages():
            self._make_runs(stage)
            points |= {self.name(axes): axes for axes in stage if axes}
        drawing.write(self.folder, read_results(map(self.result, points.values())))
        print((self.folder / "table.md").read_text(encoding="utf-8"))
        print(f"All tables and figures: {self.folder}/*.md, *.csv, *.png")

    def _make_runs(self, points: Sequence[Axes]) -> None:
        """Make the runs of a stage that are not done."""
        began, s = time.monotonic(), self.settings
        done = [axes for axes in points if self.result(axes).exists()]
        if done:
            text_settings = self.run(done[0]).text_settings()
            for axes in done:
                self.run(axes).check_resume(text_settings)
        waiting = [axes for axes in points if axes not in done]
        if not waiting:
            return
        print(f"{self.folder}: {len(points)} runs, {len(done)} of them done; {s.JOBS} at a time", flush=True)
        command = [sys.executable, "-m", "recipes.grid.front", self.recipe.target]
        names = [self.name(axes) for axes in waiting]
        runs = [Job(name, [*command, name, *self.recipe.words], self.folder / name) for name in names]
        if s.WHERE == "slurm":
            needs = replace(self.recipe.file.needs, gpus=0 if self.on_cpu else 1, cpus=s.OMP_NUM_THREADS or 1)
            ended = slurm.run(runs, needs, s.JOBS, slurm.read_settings(Path(s.SLURM)), self.folder / "slurm")
        else:
            ended = run_jobs(runs, s.JOBS, [] if self.on_cpu else [gpu.uuid for gpu in visible_gpus()])
        failed = []
        for number, (job, status) in enumerate(ended, start=1):
            failed += [job] if status else []
            left = (time.monotonic() - began) / number * (len(waiting) - number)
            text = f"{job.name}: {job.last_line()}; {len(done) + number - len(failed)} of {len(points)} runs done"
            print(f"{text}, {tqdm.format_interval(left)} left" if number < len(waiting) else text, flush=True)
        if failed:
            logs = ", ".join(str(job.log) for job in failed[:3])
            raise ValueError(f"{len(failed)} of {len(waiting)} runs failed; their output: {logs}.")


class Warmup(Grid):
    def points(self) -> Iterator[Axes]:
        """As in `Grid`, but each optimizer has its own rates."""
        s = self.settings
        rates = {"adam": s.ADAM_LRS, "sgd": s.SGD_LRS}
        for seed, scheme, optimizer, warmup in itertools.product(s.SEEDS, s.SCHEMES, s.OPTIMIZERS, s.WARMUPS):
            for lr in rates[optimizer]:
                yield dict(zip(self.recipe.file.axes, map(str, (scheme, optimizer, warmup, lr, seed))))
