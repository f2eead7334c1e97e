"""The grid of new layers on a pre-trained encoder: a text of its own, a run before the others, and classifiers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipes.compare.ranking import Ranking
from recipes.compare.rows import read_results
from recipes.deeper.summary import at_best_rates
from recipes.grid import texts
from recipes.grid.grids import Grid, Options, Point, words
from recipes.grid.run import Run
from recipes.machines import DEVICES, PRECISIONS
from recipes.steps import settings as held


class Deeper(Grid):
    before = Point("encoder", {}, [])

    def controls(self) -> list[str]:
        s, given = self.settings, self.recipe.given
        named = [*(["quick"] if s.QUICK else []), *(["text"] if s.DATA else [])]
        named += [f"factor{given['FACTOR']}"] if s.FACTOR != 0.1 else []
        return [*named, *([f"dropout{given['DROPOUT']}"] if s.DROPOUT else [])]

    def make_text(self) -> None:
        texts.for_classes(self.settings, self.folder)

    def common(self) -> list[str]:
        return [*words(self.listed("all")), *DEVICES["cpu"], *PRECISIONS[self.settings.PRECISION]]

    def pretraining(self) -> list[str]:
        return words(self.listed("pretraining"))

    def classifying(self) -> list[str]:
        return [*words(self.listed("classifying")), *self.settings.TRAIN_ARGS]

    def record(self) -> dict[str, Any]:
        s = self.settings
        numbers = ("words", "pair", "encoder_updates", "updates", "warmup", "ffn_init")
        record = {name: str(getattr(s, name.upper())) for name in numbers}
        record |= {"pairs": f"{s.PRETRAIN}/{s.EXAMPLES}/{s.HELD_OUT}", "data": s.DATA or ""}
        return record | held.options([*self.common(), *self.pretraining(), *self.classifying()])

    def run(self, point: Point) -> Run:
        s, data = self.settings, str(self.data)
        if point is self.before:
            updates = s.ENCODER_UPDATES
            return Run({}, data, [*self.common(), *self.pretraining()], updates, updates, s.ENCODER_SAVE_EVERY)
        options = [*self.common(), *self.classifying(), *point.options]
        start = str(self.folder / "encoder/checkpoints")
        return Run(point.axes, data, options, s.UPDATES, s.UPDATES, s.SAVE_EVERY, "classes", start=start)

    def options(self, axis: str, place: str) -> Options:
        """DT-Fixup draws its feed-forward weights from Xavier's law itself; the others get the same."""
        s = self.settings
        if axis == "scheme":
            scheme = {"--more-scheme": place} if place != "none" else {}
            warmup = 0 if place == "dt-fixup" else s.WARMUP
            return {**scheme, "--admin-ffn-init": s.FFN_INIT, "--warmup-updates": warmup}
        return {"--more-layers": place} if axis == "layers" else super().options(axis, place)

    def points(self) -> Iterator[Point]:
        """The head alone is the scheme `none`."""
        s = self.settings
        yield from (self.point("none", 0, lr, seed) for seed, lr in itertools.product(s.SEEDS, s.RATES))
        yield from super().points()

    def best(self, results: list[Path]) -> list[Ranking]:
        return at_best_rates(read_results(results))
