"""A grid of runs: its axes, the recipe of each run, and in which order they run.

The axes and options that all its runs have are in its YAML. A run is an ordinary run of the recipe whose text it has.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fairseq_admin.method.schemes import SCHEMES
from recipes import recipe as recipes
from recipes.compare.ranking import rankings
from recipes.compare.rows import read_results
from recipes.grid import texts
from recipes.grid.runs import GENERATE_ARGS, GridRun, PointRecipe, TranslationRun
from recipes.recipe import Recipe

Axes = dict[str, str]
"""A run's place in the grid, by axis."""
NAMED = {"layers": "{}l", "warmup": "w{}", "lr": "lr{}", "beta2": "b{}", "seed": "s{}"}
"""The parts of a run's name by axis, if not the place itself."""
TEXTS = {"cpu": "own", "gpu": "demo", "multi30k": "multi30k", "quick": "own"}
"""The recipe of a grid's runs, by preset. `own` has the generated text."""
SETTINGS = {"scheme": "METHOD", "layers": "LAYERS", "lr": "LR", "warmup": "WARMUP", "seed": "SEED"}
"""The recipe's setting for an axis."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"--optimizer": "adam"},
    "sgd": {"--optimizer": "sgd", "--momentum": 0, "--adam-betas": None},
}


def as_text(value: Any) -> str:
    """A setting as a user would give it."""
    return shlex.join(map(str, value)) if isinstance(value, tuple) else "" if value is None else str(value)


class Grid:
    """Models that translate a generated text, or a recipe's."""

    run_type: type[GridRun] = TranslationRun

    def __init__(self, recipe: Recipe) -> None:
        s, file, given = recipe.settings, recipe.file, recipe.given
        self.recipe, self.settings = recipe, s
        usual = {name: field.default for name, field in file.model.model_fields.items()} | file.values("", s.PRESET)
        differing = [name for name in file.named if name in given and getattr(s, name) != usual[name]]
        parts = [recipe.target, *(file.named[name].format(given[name]) for name in differing)]
        self.folder = Path(s.RUNS, "-".join([*parts, *([s.PRESET] if s.PRESET != "cpu" else [])]))
        self.on_cpu = s.PRESET != "gpu" or "--cpu" in s.TRAIN_ARGS

    @property
    def patience(self) -> int:
        """Updates in which a run must improve, or it ends early."""
        return getattr(self.settings, "PATIENCE", None) or self.settings.UPDATES

    def name(self, axes: Axes) -> str:
        return "-".join(NAMED.get(axis, "{}").format(place) for axis, place in axes.items())

    def points(self) -> Iterator[Axes]:
        """Seed by seed, so that a grid that is stopped has every scheme at every rate with the seeds that it has."""
        *axes, seeds = (getattr(self.settings, name) for name in self.recipe.file.axes.values())
        for seed, *places in itertools.product(seeds, *axes):
            yield dict(zip(self.recipe.file.axes, map(str, [*places, seed])))

    def stages(self) -> Iterator[list[Axes]]:
        """The runs of one stage after another, the last of which may depend on the results of those before."""
        points = list(self.points())
        if self.settings.SEARCH == "every":
            yield points
            return
        first = str(self.settings.SEEDS[0])
        tried = [axes for axes in points if axes["seed"] == first]
        yield tried
        results = [self.folder / self.name(axes) / "result.csv" for axes in tried]
        best = {(one.scheme, one.layers, one.best) for one in rankings(read_results(results))}
        yield [
            axes for axes in points if axes["seed"] != first and (axes["scheme"], axes["layers"], axes["lr"]) in best
        ]

    # -- a run -------------------------------------------------------------------------------------------------------

    def run(self, axes: Axes) -> GridRun:
        return self.run_type(self, axes, self.settings.UPDATES)

    def recipe_of(self, axes: Axes, updates: int) -> PointRecipe:
        """The recipe of a run: the grid's settings, the places on its axes, and the last checkpoint alone."""
        s, target = self.settings, TEXTS[self.settings.PRESET]
        names = {*recipes.files()[target][0].names} - {"PAIRS", "WHERE"}
        given = {"INIT": "reference"}
        given |= {name: as_text(value) for name, value in s if name in names and as_text(value)}
        given |= {SETTINGS[axis]: place for axis, place in axes.items() if axis in SETTINGS}
        if SCHEMES[axes["scheme"]].ffn is None:  # its initialisation has feed-forward weights of its own
            given["FFN_INIT"] = "xavier"
        if target != "multi30k" and s.DATA:
            raise ValueError(f"DATA={s.DATA} with PRESET={s.PRESET}: the text is generated. Leave DATA= out.")
        if target == "own":
            text = texts.reversed_text(self.folder, (s.PAIRS, s.VALID_PAIRS, s.TEST_PAIRS), s.WORDS)
            given |= {"DATA": str(text), "PAIR": "a-b", "TOKENISER": "", "MERGES": str(10 * s.WORDS)}
        given |= {"PRESET": "cpu", "DEVICE": "gpu" if s.PRESET == "gpu" else "cpu", "AVERAGE": "1"}
        given["GENERATE_ARGS"] = GENERATE_ARGS + (" --cpu" if s.PRESET != "gpu" else "")
        given["UPDATES"] = str(updates)
        return PointRecipe(**vars(recipes.read(target, given)), grid=self.folder, point=self.name(axes))

    def listed(self, *groups: str) -> dict[str, Any]:
        """The options that the grid's YAML lists for some runs."""
        values = {"FFN": 4 * self.settings.WIDTH, **dict(self.settings)}
        options = {name: value for group in groups for name, value in self.recipe.file.options[group].items()}
        return {name: value if value is None else str(value).format(**values) for name, value in options.items()}

    def options(self, axes: Axes) -> dict[str, Any]:
        """fairseq's options that are not settings of the recipe; None for one that its optimizer or schedule lacks."""
        betas = {"--adam-betas": f"(0.9, {axes['beta2']})"} if "beta2" in axes else {}
        return self.listed("all") | betas | OPTIMIZERS.get(axes.get("optimizer", ""), {})


class Warmup(Grid):
    def points(self) -> Iterator[Axes]:
        """Each optimizer has rates of its own."""
        s = self.settings
        rates = {"adam": s.ADAM_LRS, "sgd": s.SGD_LRS}
        for seed, scheme, optimizer, warmup in itertools.product(s.SEEDS, s.SCHEMES, s.OPTIMIZERS, s.WARMUPS):
            for lr in rates[optimizer]:
                yield dict(zip(self.recipe.file.axes, map(str, (scheme, optimizer, warmup, lr, seed))))
