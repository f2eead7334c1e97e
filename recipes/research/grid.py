"""A grid of runs: its axes, the order of its runs, the recipe of each run, and the whole grid from start to end.

    python -m recipes.research.grid compare SCHEMES="admin pre-ln" JOBS=8 WHERE=slurm
    python -m recipes.research.grid compare admin-18l-lr1e-3-s1 ...    # one run of it

grids.yaml has the axes, and options of fairseq-train in place of the recipe's. A run is an ordinary run of a
recipe, with its text. An interrupted grid goes on with the same command, and repeats no finished run.
"""

from __future__ import annotations

import itertools
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from tqdm import tqdm

from fairseq_admin.method.schemes import SCHEMES
from recipes import machines, recipe, slurm
from recipes import options as opts
from recipes.__main__ import command_line, start
from recipes.options import Options
from recipes.processes import Job, Needs, run_jobs
from recipes.recipe import EVERY, NEUTRAL, Recipe, number, with_precision
from recipes.research import grid_settings, texts
from recipes.research.ranking import rankings
from recipes.research.rows import read_results
from recipes.research.runs import GridRun
from recipes.settings import collect, described, exported, validated
from recipes.steps.common import run
from recipes.steps.guard import locked
from recipes.training import as_words

Axes = dict[str, str]
"""A run's value on each axis of the grid."""
NAMED = {"layers": "{}l", "warmup": "w{}", "lr": "lr{}", "beta2": "b{}", "seed": "s{}"}
"""Formats of the values in a run's name. A value without a format stands for itself."""
OF_AXES = {"--lr", "--seed", "--admin-scheme", "--admin-init", "--more-scheme", "--more-layers"}
"""Options that the axes and settings of a grid decide."""
OPTIMIZERS: dict[str, Options] = {
    "adam": {"--optimizer": "adam"},
    "sgd": {"--optimizer": "sgd", "--momentum": "0", "--adam-betas": opts.TAKEN_AWAY},
}


class Preset(BaseModel, extra="forbid"):
    recipe: str = ""
    """the recipe of the runs"""
    settings: dict[str, Any] = {}
    train: list[str] = []
    generate: list[str] = []


class File(Preset):
    """A grid in grids.yaml."""

    needs: Needs = Needs()
    axes: dict[str, str]
    """the axes, in the order in which they name a run, the seed last, each with the setting of its values"""
    pretraining: list[str] = []
    classifying: list[str] = []
    presets: dict[str, Preset]


def read_file(target: str) -> File:
    grids = yaml.safe_load(Path(__file__).with_name("grids.yaml").read_text(encoding="utf-8"))
    return validated(File, grids[target])


class Grid:
    """A grid of models that translate a generated text, or the text of a recipe."""

    run_type: type[GridRun] = GridRun

    def __init__(self, target: str, values: dict[str, str]) -> None:
        self.target, self.file, self.values = target, read_file(target), values
        self.preset = values.get("PRESET") or next(iter(self.file.presets))
        if self.preset not in self.file.presets:
            raise ValueError(f"PRESET={self.preset} is unknown; expected {' or '.join(self.file.presets)}.")
        preset = self.file.presets[self.preset]
        merged = {**self.file.settings, **preset.settings, **values}
        self.settings: Any = validated(grid_settings.KINDS[target], merged)
        self.own = opts.parse(self.file.train) | opts.parse(preset.train)
        self.user = opts.parse(self.settings.ARGS)
        if fixed := OF_AXES & self.user.keys():
            raise ValueError(f"{min(fixed)} in ARGS: {target} sets it. Leave it out, or give its setting.")
        unnamed = NEUTRAL["train"] - {"--max-tokens", "--update-freq"} | EVERY
        changed = opts.without(opts.changes(self.own, self.own | self.user), unnamed)
        prepared = opts.part_of_name(opts.parse(self.settings.PREPARE_ARGS))
        parts = [target, opts.part_of_name(changed), prepared, *self.named(), self.preset.replace("cpu", "")]
        self.folder = Path(self.settings.RUNS, "-".join(filter(None, parts)))
        self.on_cpu = self.preset != "gpu" or "--cpu" in self.user
        self.patience: int = getattr(self.settings, "PATIENCE", None) or self.settings.UPDATES or 0
        """A run ends early after so many updates without improvement."""
        self._fit(self.settings.UPDATES or 0)

    def _fit(self, updates: int) -> None:
        """Fit the grid's own interval of checkpoints to the length of its runs. Refuse a user's that does not fit.

        Raises:
            ValueError: the last updates, or the last ones before PATIENCE, would be in no checkpoint.
        """
        if min(EVERY) not in self.own | self.user:
            return
        every = number(self.own | self.user, min(EVERY))
        if updates % every and min(EVERY) not in self.user:
            every = next(size for size in range(min(every, updates), 0, -1) if updates % size == 0)
            self.own |= dict.fromkeys(EVERY, str(every))
        for name, value in {"UPDATES": updates, "PATIENCE": self.patience}.items():
            if value % every:
                raise ValueError(f"{name}={value} is not a multiple of {min(EVERY)} {every}. Give another of them.")

    def named(self) -> list[str]:
        """Settings that change the name of the grid's folder."""
        return [] if self.settings.INIT == "reference" else [self.settings.INIT]

    # -- the runs ----------------------------------------------------------------------------------------------------

    def name(self, axes: Axes) -> str:
        return "-".join(NAMED.get(axis, "{}").format(value) for axis, value in axes.items())

    def result(self, axes: Axes) -> Path:
        return self.folder / self.name(axes) / "result.csv"

    def points(self) -> Iterator[Axes]:
        """All runs, seed by seed. So, if a grid is stopped, its finished seeds have every scheme and rate."""
        *axes, seeds = (getattr(self.settings, name) for name in self.file.axes.values())
        for seed, *values in itertools.product(seeds, *axes):
            yield dict(zip(self.file.axes, map(str, [*values, seed])))

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

    def text_of(self, axes: Axes) -> Any:
        """The text of a run; None: that of its recipe."""

    def recipe_of(self, axes: Axes, updates: int) -> Recipe:
        """The recipe of a run up to some update: the grid's options, the run's values on the axes, and no averaging."""
        s, preset = self.settings, self.file.presets[self.preset]
        generate = opts.parse(self.file.generate) | opts.parse(preset.generate) | opts.parse(s.GENERATE_ARGS)
        prepare = opts.parse(s.PREPARE_ARGS)
        values = {"RUNS": s.RUNS, "UPDATES": str(updates), "AVERAGE_ARGS": "--last 1"}
        values["PRESET"] = "cpu" if "cpu" in recipe.files()[preset.recipe][1].presets else ""
        if preset.recipe != "multi30k" and s.DATA:
            raise ValueError(f"DATA={s.DATA} with PRESET={self.preset}: the text is generated. Leave DATA= out.")
        values["DATA"] = s.DATA or ""
        if preset.recipe == "own":
            text = texts.reversed_text(self.folder, (s.PAIRS, s.VALID_PAIRS, s.TEST_PAIRS), s.WORDS)
            values |= {"DATA": str(text), "PAIR": "a-b"}
            prepare = {"--tokeniser": opts.TAKEN_AWAY, "--merges": str(10 * s.WORDS)} | prepare
        options = {"ARGS": self.options(axes), "GENERATE_ARGS": generate, "PREPARE_ARGS": prepare}
        values |= {name: shlex.join(opts.words(some)) for name, some in options.items()}
        return recipe.read(preset.recipe, values, self.folder / self.name(axes))

    def options(self, axes: Axes) -> Options:
        """fairseq's options of a run, in place of its recipe's."""
        s, scheme = self.settings, axes["scheme"]
        options = self.own | self.user | {"--admin-scheme": scheme, "--admin-init": s.INIT, "--seed": axes["seed"]}
        encoder, _, decoder = axes.get("layers", str(getattr(s, "LAYERS", ""))).partition("-")
        options |= {"--encoder-layers": encoder, "--decoder-layers": decoder or encoder, "--lr": axes["lr"]}
        options |= {"--warmup-updates": axes["warmup"]} if "warmup" in axes else {}
        options |= {"--adam-betas": shlex.quote(f"(0.9, {axes['beta2']})")} if "beta2" in axes else {}
        options |= {"--total-num-update": str(s.UPDATES)} if "--power" in options else {}
        options |= {"--admin-ffn-init": "xavier"} if SCHEMES[scheme].ffn is None else {}  # it sets its own weights
        options |= with_precision(s.PRECISION)
        return options | OPTIMIZERS.get(axes.get("optimizer", ""), {})

    # -- the whole grid ----------------------------------------------------------------------------------------------

    def jobs(self, goal: str) -> list[Job]:
        """The cluster job that makes the grid: it submits the runs."""
        command = [sys.executable, "-m", "recipes.research.grid", self.target, *as_words(self.values)]
        return [Job(self.target, command, self.folder, self.file.needs)]

    def is_done(self, goal: str) -> bool:
        return (self.folder / "table.md").exists()

    def lines(self, goal: str) -> list[str]:
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
            ValueError: a run failed, or a finished run was made with other options.
        """
        with locked(self.folder / ".guard", wait=False):
            self._make()

    def _make(self) -> None:
        from recipes.research import drawing  # imports matplotlib

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
        for axes in done:
            self.run(axes).check()
        waiting = [axes for axes in points if axes not in done]
        if not waiting:
            return
        print(f"{self.folder}: {len(points)} runs, {len(done)} of them done; {s.JOBS} at a time", flush=True)
        command = [sys.executable, "-m", "recipes.research.grid", self.target]
        names = [self.name(axes) for axes in waiting]
        runs = [Job(name, [*command, name, *as_words(self.values)], self.folder / name) for name in names]
        if s.on_cluster:
            needs = replace(self.file.needs, gpus=0 if self.on_cpu else 1)
            ended = slurm.run(runs, needs, s.JOBS, slurm.settings_of(s.WHERE), self.folder / "slurm")
        else:
            ended = run_jobs(runs, s.JOBS, [] if self.on_cpu else [gpu.uuid for gpu in machines.visible_gpus()])
        failed = []
        for number_, (job, status) in enumerate(ended, start=1):
            failed += [job] if status else []
            left = (time.monotonic() - began) / number_ * (len(waiting) - number_)
            text = f"{job.name}: {job.last_line()}; {len(done) + number_ - len(failed)} of {len(points)} runs done"
            print(f"{text}, {tqdm.format_interval(left)} left" if number_ < len(waiting) else text, flush=True)
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
                yield dict(zip(self.file.axes, map(str, (scheme, optimizer, warmup, lr, seed))))


def of(target: str, values: dict[str, str]) -> Grid:
    """The grid of a target, with the user's values.

    Raises:
        ValueError: a setting or an option is invalid.
    """
    from recipes.research.deeper import Deeper

    return {"warmup": Warmup, "deeper": Deeper}.get(target, Grid)(target, values)


def main() -> None:
    targets = list(grid_settings.KINDS)
    args = command_line(targets)
    if args.target not in targets:
        raise ValueError(f"{args.target} is unknown; expected one of {' '.join(targets)}.")
    name = args.words.pop(0) if args.words and "=" not in args.words[0] else ""
    known = grid_settings.KINDS[args.target].model_fields
    values = collect(args.target, args.words, known, args.options)
    if args.help:
        file = read_file(args.target)
        defaults = {**file.settings, **file.presets[values.get("PRESET") or next(iter(file.presets))].settings}
        print("\n".join(described(grid_settings.KINDS[args.target], known, defaults | values)))
        return
    os.environ.update(exported(1))
    grid = of(args.target, values)
    if name:
        points: list[Axes] = [{}, *grid.points()]
        grid.run(next(axes for axes in points if grid.name(axes) == name)).work()
        return
    start(grid, "all", args.dry_run)


if __name__ == "__main__":
    run(main)
