"""The grids that train translation models: their runs, and fairseq's options for each.

compare has schemes x depths x rates x seeds, sensitivity schemes x rates x beta2, warmup schemes x optimizers x
warm-ups x rates. Folders and options are those of earlier versions, so a grid that they began is gone on with.
"""

from __future__ import annotations

import abc
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.compare.ranking import Ranking, rankings
from recipes.compare.rows import read_results
from recipes.grid import settings as kinds
from recipes.grid.run import Run
from recipes.machines import DEVICES, PRECISIONS
from recipes.steps import settings as held
from recipes.steps.plugin import SCHEMES


@dataclass(frozen=True)
class Point:
    """A run's place in a grid."""

    name: str
    axes: dict[str, str]
    options: list[str]


def scheme_options(scheme: str, ffn_init: str) -> list[str]:
    """Some schemes draw feed-forward weights of their own, from Xavier's law, whatever FFN_INIT is."""
    weights = ["--admin-ffn-init", ffn_init] if SCHEMES[scheme].ffn is not None else []
    return ["--admin-scheme", scheme, *weights]


class Grid(abc.ABC):
    """A grid of translation models; what differs between them is in the classes below."""

    optimizer = ["--optimizer", "radam"]
    name: str
    settings: kinds.Translation

    def __init__(self, settings: Any, given: dict[str, str], folder: Path | None = None) -> None:
        self.settings, self.given = settings, given
        preset = "" if settings.PRESET == "cpu" else f"-{settings.PRESET}"
        self.folder = folder or Path(settings.RUNS, f"{self.name}{self.controls()}{preset}")
        runs = Path(settings.RUNS)
        places = {
            "cpu": (self.folder, "a-b"),
            "gpu": (runs / "demo/data", "de-en"),
            "multi30k": (runs / "multi30k/de-en/data", "de-en"),
        }
        self.text, self.pair = places[settings.PRESET]
        self.data = self.text / "bin"
        self.source, self.target = self.pair.split("-")

    def controls(self) -> str:
        """What of the folder's name says that another setting was given."""
        return ""

    @property
    def generated(self) -> bool:
        return self.settings.PRESET == "cpu"

    @property
    def on_cpu(self) -> bool:
        return self.settings.PRESET != "gpu" or "--cpu" in self.settings.TRAIN_ARGS

    def schedule(self) -> list[str]:
        """The learning rate falls linearly to 0."""
        options = ["--lr-scheduler", "polynomial_decay", "--power", "1", "--end-learning-rate", "0"]
        layers = str(self.settings.LAYERS)  # type: ignore[attr-defined]
        options += ["--total-num-update", str(self.settings.UPDATES)]
        return [*options, "--encoder-layers", layers, "--decoder-layers", layers]

    def embeddings(self) -> list[str]:
        return ["--share-all-embeddings"]

    def options(self) -> list[str]:
        """fairseq-train's, of every run.

        fairseq's own models are built through the plugin too, which equals them bit for bit and says when one diverges.
        """
        s = self.settings
        values = {
            "--arch": "transformer_admin", "--encoder-embed-dim": s.WIDTH, "--encoder-ffn-embed-dim": s.FFN,
            "--encoder-attention-heads": s.HEADS, "--decoder-attention-heads": s.HEADS, "--dropout": s.DROPOUT,
            "--clip-norm": s.CLIP_NORM, "--criterion": "label_smoothed_cross_entropy_fast", "--label-smoothing": "0.1",
            "--max-tokens": s.MAX_TOKENS, "--required-batch-size-multiple": "1", "--log-interval": s.LOG_EVERY,
        }  # fmt: skip
        words = [str(word) for item in values.items() for word in item]
        device = DEVICES["gpu" if s.PRESET == "gpu" else "cpu"]
        words += [*self.embeddings(), *self.optimizer, *self.schedule(), *device, *PRECISIONS[s.PRECISION]]
        return [*words, *s.TRAIN_ARGS]

    def record(self) -> dict[str, Any]:
        """What the runs are held to. Translating is among it: a run's checkpoints are gone once it has its result."""
        s = self.settings
        record: dict[str, Any] = {
            "updates": str(s.UPDATES),
            "leg": str(s.LEG or s.UPDATES),
            "beam": str(s.BEAM),
            "ffn_init": s.FFN_INIT,
        }
        if self.generated:
            record |= {"pairs": f"{s.PAIRS}/{s.VALID_PAIRS}/{s.TEST_PAIRS}", "words": str(s.WORDS)}
        else:
            record |= held.read(self.text / "settings.json")
        return record | held.options(self.options())

    def run(self, point: Point) -> Run:
        s = self.settings
        translate = ["--beam", str(s.BEAM), "--max-len-a", "1.2", "--max-len-b", "10", "--max-tokens", "2000"]
        translate += {"cpu": DEVICES["cpu"], "gpu": ["--remove-bpe"], "multi30k": ["--cpu", "--remove-bpe"]}[s.PRESET]
        by: dict[str, Any] = {"options": translate, "protocol": s.PROTOCOL}
        by["entropy"] = json.loads((self.folder / "entropy.json").read_text(encoding="utf-8"))["bits"]
        if s.PRESET == "multi30k":
            by |= {"text": str(self.text / "text.json"), "raw": f"{s.RUNS}/multi30k/raw/test"}
        options = [*self.options(), *point.options]
        leg = s.LEG or s.UPDATES
        return Run(point.axes, str(self.data), options, s.UPDATES, leg, s.SAVE_EVERY, "translation", by)

    @abc.abstractmethod
    def points(self) -> Iterator[Point]:
        """All runs, in their order."""

    def stages(self) -> Iterator[list[Point]]:
        """The runs of one stage after another, the second of which may depend on the results of the first."""
        yield list(self.points())

    def tables(self, results: list[Path]) -> list[tuple[str, list[object]]]:
        """The programs that write tables and figures, with their arguments; and the first file is what is shown."""
        return [("figures.grid", [self.folder, *results])]

    summary = ["table.md", "table.csv", "runs.csv", "rates.png"]


class Sensitivity(Grid):
    name = "sensitivity"
    settings: kinds.Sensitivity

    def schedule(self) -> list[str]:
        return [*super().schedule(), "--warmup-updates", "0"]

    def points(self) -> Iterator[Point]:
        s = self.settings
        for scheme, lr, beta2, seed in itertools.product(s.SCHEMES, s.LRS, s.BETA2S, s.SEEDS):
            options = [*scheme_options(scheme, s.FFN_INIT), "--lr", lr, "--adam-betas", f"(0.9, {beta2})"]
            axes = {"scheme": scheme, "lr": lr, "beta2": beta2, "seed": seed}
            yield Point(f"{scheme}-lr{lr}-b{beta2}-s{seed}", axes, [*options, "--seed", seed])


class Warmup(Grid):
    name = "warmup"
    settings: kinds.Warmup
    optimizer = ["--optimizer", "adam"]
    optimizers = {
        "adam": ["--optimizer", "adam", "--adam-betas", "(0.9, 0.98)"],
        "sgd": ["--optimizer", "sgd", "--momentum", "0"],
    }

    def points(self) -> Iterator[Point]:
        s = self.settings
        rates = {"adam": s.ADAM_LRS, "sgd": s.SGD_LRS}
        for scheme, optimizer, warmup in itertools.product(s.SCHEMES, s.OPTIMIZERS, s.WARMUPS):
            for lr, seed in itertools.product(rates[optimizer], s.SEEDS):
                options = [*scheme_options(scheme, s.FFN_INIT), *self.optimizers[optimizer]]
                options += ["--warmup-updates", warmup, "--lr", lr, "--seed", seed]
                axes = {"scheme": scheme, "optimizer": optimizer, "warmup": warmup, "lr": lr, "seed": seed}
                yield Point(f"{scheme}-{optimizer}-w{warmup}-lr{lr}-s{seed}", axes, options)


class Compare(Grid):
    name = "compare"
    settings: kinds.Compare
    optimizer = ["--optimizer", "radam", "--adam-betas", "(0.9, 0.98)"]
    summary = ["standing.md", "standing.csv", "table.md", "table.csv", "runs.csv", "rates.png", "curves.png"]

    def controls(self) -> str:
        """What else the outcome may hang on."""
        s, given = self.settings, self.given
        named = [
            f"-{word}{given[name]}"
            for name, word in (("MAX_TOKENS", "tokens"), ("DROPOUT", "dropout"))
            if given.get(name)
        ]
        return "".join(
            [*named, *(["-untied"] if s.TIED == "no" else []), *(["-ffn-stock"] if s.FFN_INIT == "stock" else [])]
        )

    def embeddings(self) -> list[str]:
        return super().embeddings() if self.settings.TIED == "yes" else []

    def schedule(self) -> list[str]:
        warmup = str(self.settings.WARMUP)
        return ["--lr-scheduler", "inverse_sqrt", "--warmup-updates", warmup, "--warmup-init-lr", "1e-7"]

    def point(self, scheme: str, layers: str, lr: str, seed: str) -> Point:
        options = [
            *scheme_options(scheme, self.settings.FFN_INIT),
            "--encoder-layers",
            layers,
            "--decoder-layers",
            layers,
        ]
        axes = {"scheme": scheme, "layers": layers, "lr": lr, "seed": seed}
        return Point(f"{scheme}-{layers}l-lr{lr}-s{seed}", axes, [*options, "--lr", lr, "--seed", seed])

    def points(self) -> Iterator[Point]:
        """Seed by seed, so that a grid that is stopped has every scheme at every rate with the seeds that it has."""
        s = self.settings
        for seed, scheme, layers, lr in itertools.product(s.SEEDS, s.SCHEMES, s.DEPTHS, s.RATES):
            yield self.point(scheme, layers, lr, seed)

    def trial(self) -> Compare | None:
        """The grid of short runs in which the rates are tried, if there is one."""
        s = self.settings
        if s.SEARCH != "short":
            return None
        short = {"SEARCH": "every", "SEEDS": s.SEEDS[:1], "UPDATES": s.SHORT, "LEG": s.SHORT}
        return Compare(s.model_copy(update=short), self.given, self.folder / "search")

    def stages(self) -> Iterator[list[Point]]:
        s = self.settings
        if s.SEARCH == "every":
            yield from super().stages()
            return
        trial = self.trial()
        tried = [point for point in self.points() if point.axes["seed"] == s.SEEDS[0]]
        if not trial:
            yield tried
        folder = trial.folder if trial else self.folder
        best = self.best([folder / point.name / "result.json" for point in tried])
        seeds = s.SEEDS if trial else s.SEEDS[1:]
        yield [self.point(it.scheme, it.layers, it.best, seed) for seed in seeds for it in best]

    def best(self, results: list[Path]) -> list[Ranking]:
        return rankings(read_results(results))

    def tables(self, results: list[Path]) -> list[tuple[str, list[object]]]:
        """At every rate there are only the runs that tried them."""
        trial = self.trial()
        searched = ["--tried", trial.folder / "runs.csv", "--updates", self.settings.SHORT] if trial else []
        return [("figures.grid", [self.folder, *results, *searched])]
