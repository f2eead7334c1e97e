"""`make deeper`: new layers on a pre-trained encoder. The encoder is a run, from whose checkpoint the others begin."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fairseq_admin.logs import Log
from recipes import options as opts
from recipes.options import Options
from recipes.recipe import COMMANDS, File, Recipe, fit
from recipes.research import texts
from recipes.research.grid import Axes, Grid
from recipes.research.rows import Row
from recipes.research.runs import GUESS, GridRun, accuracy, cost
from recipes.settings import Settings
from recipes.steps.checkpoints import newest
from recipes.steps.common import write_lines
from recipes.steps.extract import unpacked
from recipes.steps.sources import Sources
from recipes.text import Step


class Pairs:
    """The text of the grid: pairs of sentences for pre-training, and labelled pairs, translations and near misses."""

    assets = ()

    def __init__(self, settings: Any, grid: Path) -> None:
        names = ("PRETRAIN", "EXAMPLES", "HELD_OUT", "WORDS", "PAIR")
        identity = [getattr(settings, name) for name in names]
        if settings.DATA:
            sources, pair = Sources(Path(settings.RUNS, "sources.json")), settings.PAIR.split("-")
            identity += [sources.content(unpacked(Path(settings.DATA), f"train.{language}")) for language in pair]
        self.settings = settings
        self.folder = grid / f"text-{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:8]}"
        self.binary, self.binarised = self.folder / "bin", self.folder / "bin/label/dict.txt"

    def fetch(self) -> None:
        """Nothing is downloaded."""

    def make(self) -> None:
        texts.write_pairs(self.settings, self.folder)


class DeeperRun(GridRun):
    """Trains a classifier on the encoder. If `axes` is empty, this run pre-trains the encoder instead."""

    def text_steps(self) -> list[Step]:
        return [Step("preprocess", [self.text.binarised], self.text.make)]

    def run_steps(self) -> list[Step]:
        return super().run_steps()[:1]

    def train_words(self) -> list[str]:
        encoder = newest(self.grid.folder / "encoder/checkpoints")
        return [*super().train_words(), *(["--finetune-from-model", str(encoder)] if self.axes else [])]

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

    def named(self) -> list[str]:
        factor, usual = self.settings.ENCODER_LR_FACTOR, type(self.settings).model_fields["ENCODER_LR_FACTOR"].default
        return ["text" if self.settings.DATA else "", f"factor{factor:g}" if factor != usual else ""]

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

    def text_of(self, axes: Axes) -> Pairs:
        return Pairs(self.settings, self.folder)

    def recipe_of(self, axes: Axes, updates: int) -> Recipe:
        s = self.settings
        train = opts.merge(self.options(axes), {"--max-update": str(updates if axes else s.ENCODER_UPDATES)})
        none: dict[str, Options] = {command: {} for command in COMMANDS}
        options = none | {"train": train, "average": {"--last": "1"}}
        fit(options, options, none)
        settings, file = Settings(RUNS=s.RUNS, PRECISION=s.PRECISION), File(kind="language-model")
        return Recipe(self.target, file, settings, options, options, none, folder=self.folder / self.name(axes))

    def options(self, axes: Axes) -> Options:
        s, preset = self.settings, opts.parse(self.file.presets[self.preset].train)
        if not axes:
            pretraining = opts.parse(self.file.train) | opts.parse(self.file.pretraining)
            return pretraining | opts.without(preset, {"--warmup-updates"})
        options = opts.parse(self.file.train) | opts.parse(self.file.classifying) | preset | self.user
        options |= {"--pretrained-lr-factor": str(s.ENCODER_LR_FACTOR), "--total-num-update": str(s.UPDATES)}
        options |= {"--lr": axes["lr"], "--seed": axes["seed"], "--more-layers": axes["layers"]}
        options |= {"--more-scheme": axes["scheme"]} if axes["scheme"] != "none" else {}
        return options | ({"--warmup-updates": "0"} if axes["scheme"] == "dt-fixup" else {})
