"""The grid of new layers on a pre-trained encoder: its texts, the pre-training, and the classifiers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipes.compare.ranking import Ranking
from recipes.compare.rows import read_results
from recipes.deeper.summary import at_best_rates
from recipes.grid import settings as kinds
from recipes.grid.grids import Compare, Point
from recipes.grid.run import Run
from recipes.machines import DEVICES, PRECISIONS
from recipes.steps import settings as held

POSITIONS = "128"


class Deeper(Compare):
    name = "deeper"
    settings: kinds.Deeper  # type: ignore[assignment]
    summary = ["table.md", "table.csv", "runs.csv", "accuracy.png"]

    def __init__(self, settings: kinds.Deeper, given: dict[str, str]) -> None:
        self.settings, self.given = settings, given
        name = "".join([self.name, "-quick" if given.get("QUICK") else "", "-text" if settings.DATA else ""])
        self.folder = Path(settings.RUNS, name + self.controls())
        self.data = self.folder / "bin"
        self.encoder = Point("encoder", {}, [])

    def controls(self) -> str:
        s = self.settings
        factor = f"-factor{s.FACTOR}" if s.FACTOR != "0.1" else ""
        return factor + (f"-dropout{s.DROPOUT}" if s.DROPOUT != "0" else "")

    @property
    def on_cpu(self) -> bool:
        return True

    def common(self) -> list[str]:
        s = self.settings
        values = {
            "--max-tokens": 2000, "--log-format": "json", "--log-interval": 20, "--optimizer": "radam",
            "--adam-betas": "(0.9, 0.98)", "--encoder-layers": s.ENCODER_LAYERS, "--encoder-embed-dim": s.WIDTH,
            "--encoder-ffn-embed-dim": 4 * s.WIDTH, "--encoder-attention-heads": s.HEADS, "--admin-scheme": "post-ln",
            "--required-batch-size-multiple": 1,
        }  # fmt: skip
        words = [str(word) for item in values.items() for word in item]
        return [*words, *DEVICES["cpu"], *PRECISIONS[s.PRECISION]]

    def pretraining(self) -> list[str]:
        options = ["--task", "masked_lm", "--arch", "masked_lm_admin", "--criterion", "masked_lm"]
        options += ["--tokens-per-sample", POSITIONS, "--sample-break-mode", "eos", "--lr", "1e-3"]
        return [*options, "--lr-scheduler", "inverse_sqrt", "--warmup-updates", "200"]

    def classifying(self) -> list[str]:
        """A sentence begins with <s> (0), whose features the head reads, as it did for the encoder."""
        s = self.settings
        values = {
            "--task": "sentence_prediction", "--arch": "deeper_admin", "--criterion": "sentence_prediction",
            "--num-classes": 2, "--init-token": 0, "--max-positions": POSITIONS, "--valid-subset": "valid,test",
            "--batch-size": 32, "--clip-norm": 5, "--pretrained-lr-factor": s.FACTOR,
            "--lr-scheduler": "polynomial_decay", "--power": 0.5, "--end-learning-rate": "1e-5",
            "--total-num-update": s.UPDATES, "--dropout": s.DROPOUT, "--attention-dropout": s.DROPOUT,
        }  # fmt: skip
        return [*(str(word) for item in values.items() for word in item), *s.TRAIN_ARGS]

    def record(self) -> dict[str, Any]:
        s = self.settings
        return {
            "pairs": f"{s.PRETRAIN}/{s.EXAMPLES}/{s.HELD_OUT}",
            "words": str(s.WORDS),
            "data": s.DATA or "",
            "pair": s.PAIR,
            "encoder_updates": str(s.ENCODER_UPDATES),
            "updates": str(s.UPDATES),
            "warmup": str(s.WARMUP),
            "ffn_init": s.FFN_INIT,
            **held.options([*self.common(), *self.pretraining(), *self.classifying()]),
        }

    def run(self, point: Point) -> Run:
        s, data = self.settings, str(self.data)
        if point is self.encoder:
            updates = s.ENCODER_UPDATES
            return Run({}, data, [*self.common(), *self.pretraining()], updates, updates, s.ENCODER_SAVE_EVERY)
        options = [*self.common(), *self.classifying(), *point.options]
        start = str(self.folder / self.encoder.name / "checkpoints")
        return Run(point.axes, data, options, s.UPDATES, s.UPDATES, s.SAVE_EVERY, "classes", start=start)

    def point(self, scheme: str, layers: str, lr: str, seed: str) -> Point:
        """DT-Fixup draws its feed-forward weights from Xavier's law itself; the others get the same."""
        options = ["--more-scheme", scheme] if scheme != "none" else []
        options += ["--more-layers", layers, "--lr", lr, "--seed", seed, "--admin-ffn-init", self.settings.FFN_INIT]
        options += ["--warmup-updates", "0" if scheme == "dt-fixup" else str(self.settings.WARMUP)]
        axes = {"scheme": scheme, "layers": layers, "lr": lr, "seed": seed}
        return Point(f"{scheme}-{layers}l-lr{lr}-s{seed}", axes, options)

    def points(self) -> Iterator[Point]:
        """The head alone is the scheme `none`."""
        s = self.settings
        for seed, lr in itertools.product(s.SEEDS, s.RATES):
            yield self.point("none", "0", lr, seed)
            for scheme, layers in itertools.product(s.SCHEMES, s.DEPTHS):
                yield self.point(scheme, layers, lr, seed)

    def stages(self) -> Iterator[list[Point]]:
        """The encoder; the first seed at every rate; then the others at the rate that was best."""
        s = self.settings
        yield [self.encoder]
        tried = [point for point in self.points() if point.axes["seed"] == s.SEEDS[0]]
        yield tried
        best = self.best([self.folder / point.name / "result.json" for point in tried])
        yield [self.point(it.scheme, it.layers, it.best, seed) for seed in s.SEEDS[1:] for it in best]

    def trial(self) -> None:
        return None

    def best(self, results: list[Path]) -> list[Ranking]:
        return at_best_rates(read_results(results))
