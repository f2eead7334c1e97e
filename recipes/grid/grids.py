"""A grid of runs: its axes, the order of its runs, and the recipe of each run.

The grid's YAML file has the axes, and the options of all runs. A run is an ordinary run of a recipe, with its text.
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


def as_text(value: Any) -> str:
    """A setting's value as a user would write it."""
    return shlex.join(map(str, value)) if isinstance(value, tuple) else "" if value is None else str(value)


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

    @property
    def patience(self) -> int:
        """A run ends early after so many updates without improvement."""
        return getattr(self.settings, "PATIENCE", None) or self.settings.UPDATES

    def name(self, axes: Axes) -> str:
        return "-".join(NAMED.get(axis, "{}").format(value) for axis, value in axes.items())

    def points(self) -> Iterator[Axes]:
        """All runs, seed by seed: a grid that was stopped has finished some seeds with every scheme and rate."""
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
        results = [self.folder / self.name(axes) / "result.csv" for axes in tried]
        best = {(one.scheme, one.layers, one.best) for one in rankings(read_results(results))}
        yield [
            axes for axes in points if axes["seed"] != first and (axes["scheme"], axes["layers"], axes["lr"]) in best
        ]

    # -- a run -------------------------------------------------------------------------------------------------------

    def run(self, axes: Axes) -> GridRun:
        return self.run_type(self, axes, self.settings.UPDATES)

    def recipe_of(self, axes: Axes, updates: int) -> PointRecipe:
        """The recipe of a run: the grid's settings, the run's values on the axes, and no averaging."""
        s, target = self.settings, TEXTS[self.settings.PRESET]
        names = {*recipes.files()[target][0].names} - {"PAIRS", "WHERE"}
        values = {"INIT": "reference"}
        values |= {name: as_text(value) for name, value in s if name in names and as_text(value)}
        values |= {SETTINGS[axis]: value for axis, value in axes.items() if axis in SETTINGS}
        if SCHEMES[axes["scheme"]].ffn is None:  # the scheme sets its own feed-forward weights
            values["FFN_INIT"] = "xavier"
        if target != "multi30k" and s.DATA:
            raise ValueError(f"DATA={s.DATA} with PRESET={s.PRESET}: the text is generated. Leave DATA= out.")
        if target == "own":
            text = texts.reversed_text(self.folder, (s.PAIRS, s.VALID_PAIRS, s.TEST_PAIRS), s.WORDS)
            values |= {"DATA": str(text), "PAIR": "a-b", "TOKENISER": "", "MERGES": str(10 * s.WORDS)}
        values |= {"PRESET": "cpu", "DEVICE": "gpu" if s.PRESET == "gpu" else "cpu", "AVERAGE": "1"}
        values |= {"GENERATE_ARGS": GENERATE_ARGS, "UPDATES": str(updates)}
        return PointRecipe(**vars(recipes.read(target, values)), grid=self.folder, point=self.name(axes))

    def listed(self, *groups: str) -> dict[str, Any]:
        """The options in some groups of the grid's YAML file."""
        values = {"FFN": 4 * self.settings.WIDTH, **dict(self.settings)}
        options = {name: value for group in groups for name, value in self.recipe.file.options[group].items()}
        return {name: value if value is None else str(value).format(**values) for name, value in options.items()}

    def options(self, axes: Axes) -> dict[str, Any]:
        """fairseq's options of a run that are not settings of its recipe. None removes an option of the recipe."""
        betas = {"--adam-betas": f"(0.9, {axes['beta2']})"} if "beta2" in axes else {}
        return self.listed("all") | betas | OPTIMIZERS.get(axes.get("optimizer", ""), {})


class Warmup(Grid):
    def points(self) -> Iterator[Axes]:
        """As in `Grid`, but each optimizer has its own rates."""
        s = self.settings
        rates = {"adam": s.ADAM_LRS, "sgd": s.SGD_LRS}
        for seed, scheme, optimizer, warmup in itertools.product(s.SEEDS, s.SCHEMES, s.OPTIMIZERS, s.WARMUPS):
            for lr in rates[optimizer]:
                yield dict(zip(self.recipe.file.axes, map(str, (scheme, optimizer, warmup, lr, seed))))
