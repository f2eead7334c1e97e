"""`make deeper`: new layers on a pre-trained encoder. The encoder is a run, from whose checkpoint the others begin."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from fairseq_admin.logs import Log
from recipes.chain import Step
from recipes.grid import texts
from recipes.grid.grids import Axes, Grid
from recipes.grid.runs import GUESS, GridRun, accuracy, cost
from recipes.recipe import Recipe, validated
from recipes.research.rows import Row
from recipes.settings import Training
from recipes.steps.checkpoints import newest
from recipes.steps.common import write_lines
from recipes.steps.extract import unpacked


class Pairs:
    """The text of the grid: pairs of sentences for pre-training, and labelled pairs, translations and near misses."""

    assets = ()

    def __init__(self, recipe: Recipe, settings: Any) -> None:
        self.settings, self.folder, self.binary = settings, recipe.text, recipe.text / "bin"
        self.binarised, self.goals = self.binary / "dict.txt", (self.binary / "label/dict.txt",)

    def record(self) -> dict[str, Any]:
        names = ("PRETRAIN", "EXAMPLES", "HELD_OUT", "WORDS", "PAIR")
        return {name.lower(): str(getattr(self.settings, name)) for name in names} | {"data": self.settings.DATA or ""}

    def steps(self) -> Iterator[Step]:
        s, program = self.settings, partial(texts.write_pairs, self.settings, self.folder)
        reads = [unpacked(Path(s.DATA), f"train.{language}") for language in s.PAIR.split("-")] if s.DATA else []
        yield Step("pairs", self.folder, (self.binarised, *self.goals), program, tuple(reads), self.record())


class DeeperRun(GridRun):
    """Trains a classifier on the encoder. If `axes` is empty, this run pre-trains the encoder instead."""

    task = []
    batch = ["--max-tokens", "2000", "--required-batch-size-multiple", "1"]

    def __init__(self, grid: Deeper, axes: Axes) -> None:
        self.text_type = partial(Pairs, settings=grid.settings)
        super().__init__(grid, axes)
        self.arch = "deeper_admin" if axes else "masked_lm_admin"
        self.final = self.generated = self.folder / "model.pt"  # no goal of this grid needs them

    def command_options(self) -> list[str]:
        encoder = newest(self.grid.folder / "encoder/checkpoints")
        return [*super().command_options(), *(["--finetune-from-model", str(encoder)] if self.axes else [])]

    def work(self) -> None:
        if self.axes:
            return super().work()
        self.make("train")
        write_lines(self.result, [])

    def row(self, log: Log, diverged: bool) -> Row:
        """The accuracies of the last checkpoint. Training has logged the accuracies of every checkpoint."""
        path = self.folder / "train.log"
        accuracies = {split: GUESS if diverged else accuracy(path, split) for split in ("valid", "test")}
        return {"diverged": diverged, **accuracies, **cost(log)}


class Deeper(Grid):
    run_type = DeeperRun

    def name(self, axes: Axes) -> str:
        return super().name(axes) if axes else "encoder"

    def stages(self) -> Iterator[list[Axes]]:
        yield [{}]
        yield from super().stages()

    def points(self) -> Iterator[Axes]:
        """Runs of the head alone (the scheme `none`), then those with new layers."""
        s = self.settings
        for seed in s.SEEDS:
            yield from ({"scheme": "none", "layers": "0", "lr": lr, "seed": str(seed)} for lr in s.RATES)
        yield from super().points()

    def recipe_of(self, axes: Axes) -> Recipe:
        s = self.settings
        values = self.shared(Training.model_fields) | {"METHOD": "post-ln", "AVERAGE": 1, "MAX_TOKENS": 2000}
        if axes:
            warmup = 0 if axes["scheme"] == "dt-fixup" else s.WARMUP
            values |= {"SEED": axes["seed"], "LR": axes["lr"], "WARMUP": warmup}
        else:
            values |= {"UPDATES": s.ENCODER_UPDATES, "SAVE_EVERY": s.ENCODER_SAVE_EVERY, "TRAIN_ARGS": ()}
        file = self.recipe.file.model_copy(update={"options": self.options(axes)})
        return Recipe(self.recipe.target, file, validated(Training, values), grid=self.folder, point=self.name(axes))

    def options(self, axes: Axes) -> dict[str, Any]:
        if not axes:
            return self.listed("all", "pretraining")
        scheme = {"--more-scheme": axes["scheme"]} if axes["scheme"] != "none" else {}
        return self.listed("all", "classifying") | scheme | {"--more-layers": axes["layers"]}
