"""A grid of runs: where its folder is, fairseq's options for each run, and in which order they run.

Its axes, and the options that all its runs have, are in its YAML. Folders and options are those of earlier versions, so
a grid that they began is gone on with.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fairseq_admin.method.schemes import SCHEMES
from recipes.compare.ranking import rankings
from recipes.compare.rows import read_results
from recipes.grid import texts
from recipes.grid.run import Run
from recipes.machines import DEVICES, PRECISIONS
from recipes.recipe import Recipe
from recipes.steps import records
from recipes.text import Text
from recipes.translation import Translation

Options = dict[str, Any]
"""fairseq's, by name."""
NAMED = {"layers": "{}l", "warmup": "w{}", "lr": "lr{}", "beta2": "b{}", "seed": "s{}"}
"""How an axis is in the name of a run's folder, where not as it is."""


def words(options: Options) -> list[str]:
    return [str(word) for item in options.items() for word in item]


@dataclass(frozen=True)
class Point:
    """A run's place in a grid."""

    name: str
    axes: dict[str, str]
    options: list[str]


class Grid:
    """Models that translate a generated text, or a recipe's; what differs is in the classes below."""

    summary = "table.md"
    """the table that is shown"""
    before: Point | None = None
    """a run that the others begin with"""

    def __init__(self, recipe: Recipe, folder: Path | None = None) -> None:
        self.recipe, self.settings = recipe, recipe.settings
        runs, preset = Path(self.settings.RUNS), self.settings.PRESET
        self.folder = folder or runs / "-".join(
            [recipe.target, *self.controls(), *([preset] if preset != "cpu" else [])]
        )
        self.text, self.pair = {
            "cpu": (self.folder, "a-b"),
            "gpu": (runs / "demo/data", "de-en"),
            "multi30k": (runs / "multi30k/de-en/data", "de-en"),
        }[preset]
        self.data = self.text / "bin"
        self.makes_text = preset == "cpu"
        self.on_cpu = preset != "gpu" or "--cpu" in self.settings.TRAIN_ARGS
        self.rule = self.settings.rule

    @property
    def search(self) -> str:
        """The seeds that every rate is run with (SEARCH)."""
        return "every"

    @property
    def tied(self) -> bool:
        """Whether all embeddings are one."""
        return True

    def controls(self) -> list[str]:
        """The parts of the folder's name that say which settings differ from the defaults."""
        return []

    def make_text(self) -> None:
        """And the entropy of one of its tokens, by which runs are judged."""
        if self.makes_text:
            texts.for_translation(self.settings, self.folder)
        else:
            Translation(texts.recipe_of(self.settings)).make("prepare")
        texts.write_entropy(self.data, self.pair, self.folder / "entropy.json")

    def listed(self, group: str) -> list[str]:
        """The options that the grid's YAML lists for some runs."""
        values = {"FFN": 4 * self.settings.WIDTH, **dict(self.settings)}
        return [word.format(**values) for word in words(self.recipe.file.options[group])]

    def common(self) -> list[str]:
        """fairseq-train's options, of every run.

        fairseq's own models are built through the plugin too, which equals them bit for bit and says when one diverges.
        """
        s = self.settings
        options = {
            "--arch": "transformer_admin", "--encoder-embed-dim": s.WIDTH, "--encoder-ffn-embed-dim": s.FFN,
            "--encoder-attention-heads": s.HEADS, "--decoder-attention-heads": s.HEADS, "--dropout": s.DROPOUT,
            "--clip-norm": s.CLIP_NORM, "--criterion": "label_smoothed_cross_entropy_fast", "--label-smoothing": "0.1",
            "--max-tokens": s.MAX_TOKENS, "--required-batch-size-multiple": "1", "--log-interval": s.LOG_EVERY,
        }  # fmt: skip
        tied = ["--share-all-embeddings"] if self.tied else []
        device = DEVICES["gpu" if s.PRESET == "gpu" else "cpu"]
        return [*words(options), *self.listed("all"), *tied, *device, *PRECISIONS[s.PRECISION], *s.TRAIN_ARGS]

    def record(self) -> dict[str, Any]:
        """What the runs are held to. Translating is among it: a run's checkpoints are gone once it has its result."""
        s = self.settings
        record: dict[str, Any] = {"updates": str(s.UPDATES), "leg": str(s.LEG or s.UPDATES)}
        record |= {"beam": str(s.BEAM), "ffn_init": s.FFN_INIT}
        if self.makes_text:
            record |= {"pairs": f"{s.PAIRS}/{s.VALID_PAIRS}/{s.TEST_PAIRS}", "words": str(s.WORDS)}
        else:
            record |= Text(texts.recipe_of(s)).record()
        record |= {"rule": self.rule} if self.rule != "reference" else {}
        return record | self.validated() | records.options(self.common())

    def validated(self) -> dict[str, str]:
        """How often a run is, since its outcome is of its last validations; records of before lack the usual number."""
        every, usual = self.settings.SAVE_EVERY, self.recipe.file.values("", self.settings.PRESET).get("SAVE_EVERY")
        return {} if every == usual else {"save_every": str(every)}

    def run(self, point: Point) -> Run:
        s = self.settings
        translate = ["--beam", str(s.BEAM), "--max-len-a", "1.2", "--max-len-b", "10", "--max-tokens", "2000"]
        translate += {"cpu": DEVICES["cpu"], "gpu": ["--remove-bpe"], "multi30k": ["--cpu", "--remove-bpe"]}[s.PRESET]
        by: dict[str, Any] = {"options": translate, "protocol": s.PROTOCOL}
        by["rule"] = self.rule if SCHEMES[point.axes["scheme"]].omega else ""
        by["entropy"] = json.loads((self.folder / "entropy.json").read_text(encoding="utf-8"))["bits"]
        if s.PRESET == "multi30k":
            by |= {"text": str(self.text / "text.json"), "raw": f"{s.RUNS}/multi30k/raw/test"}
        options = [*self.common(), *point.options]
        return Run(point.axes, str(self.data), options, s.UPDATES, s.LEG or s.UPDATES, s.SAVE_EVERY, "translation", by)

    def options(self, axis: str, place: str) -> Options:
        """fairseq's, for a place on an axis.

        Some schemes draw feed-forward weights of their own, from Xavier's law, whatever FFN_INIT is.
        """
        if axis == "scheme":
            weights = {"--admin-ffn-init": self.settings.FFN_INIT} if SCHEMES[place].ffn is not None else {}
            rule = {"--admin-init": self.rule} if SCHEMES[place].omega else {}
            return {"--admin-scheme": place, **weights, **rule}
        if axis == "layers":
            encoder, _, decoder = place.partition("-")
            return {"--encoder-layers": encoder, "--decoder-layers": decoder or encoder}
        if axis == "beta2":
            return {"--adam-betas": f"(0.9, {place})"}
        return {"--warmup-updates" if axis == "warmup" else f"--{axis}": place}

    def point(self, *places: object) -> Point:
        axes = dict(zip(self.recipe.file.axes, map(str, places)))
        name = "-".join(NAMED.get(axis, "{}").format(place) for axis, place in axes.items())
        return Point(name, axes, [word for item in axes.items() for word in words(self.options(*item))])

    def points(self) -> Iterator[Point]:
        """Seed by seed, so that a grid that is stopped has every scheme at every rate with the seeds that it has."""
        *axes, seeds = (getattr(self.settings, name) for name in self.recipe.file.axes.values())
        for seed, *places in itertools.product(seeds, *axes):
            yield self.point(*places, seed)

    def trial(self) -> Grid | None:
        """The grid of short runs in which the rates are tried, if there is one."""
        s = self.settings
        if self.search != "short":
            return None
        short = {"SEARCH": "every", "SEEDS": s.SEEDS[:1], "UPDATES": s.SHORT, "LEG": s.SHORT}
        return type(self)(replace(self.recipe, settings=s.model_copy(update=short)), self.folder / "search")

    def stages(self) -> Iterator[list[Point]]:
        """The runs of one stage after another, the last of which may depend on the results of those before."""
        seeds, points, trial = self.settings.SEEDS, list(self.points()), self.trial()
        if self.before:
            yield [self.before]
        if self.search == "every":
            yield points
            return
        tried = [point for point in points if point.axes["seed"] == str(seeds[0])]
        if not trial:
            yield tried
        results = [(trial or self).folder / point.name / "result.json" for point in tried]
        for_best = itertools.product(seeds if trial else seeds[1:], rankings(read_results(results)))
        yield [self.point(ranking.scheme, ranking.layers, ranking.best, seed) for seed, ranking in for_best]


class Warmup(Grid):
    def controls(self) -> list[str]:
        return ["quick"] if self.settings.QUICK else []

    def options(self, axis: str, place: str) -> Options:
        if axis == "optimizer":
            return {"--optimizer": place, **({"--momentum": 0} if place == "sgd" else {"--adam-betas": "(0.9, 0.98)"})}
        return super().options(axis, place)

    def points(self) -> Iterator[Point]:
        s = self.settings
        rates = {"adam": s.ADAM_LRS, "sgd": s.SGD_LRS}
        for seed, scheme, optimizer, warmup in itertools.product(s.SEEDS, s.SCHEMES, s.OPTIMIZERS, s.WARMUPS):
            yield from (self.point(scheme, optimizer, warmup, lr, seed) for lr in rates[optimizer])


class Compare(Grid):
    summary = "standing.md"

    @property
    def search(self) -> str:
        return self.settings.SEARCH

    @property
    def tied(self) -> bool:
        return self.settings.TIED == "yes"

    def controls(self) -> list[str]:
        s, given = self.settings, self.recipe.given
        numbers = (("tokens", "MAX_TOKENS"), ("dropout", "DROPOUT"))
        named = [f"{word}{given[name]}" for word, name in numbers if given.get(name)]
        named += [] if self.tied else ["untied"]
        named += ["ffn-stock"] if s.FFN_INIT == "stock" else []
        return [*named, *([s.INIT] if s.INIT != "reference" else [])]


class Deeper(Grid):
    """New layers on a pre-trained encoder: a text of its own, a run before the others, and classifiers."""

    before = Point("encoder", {}, [])

    @property
    def search(self) -> str:
        return "first"

    def controls(self) -> list[str]:
        s, given = self.settings, self.recipe.given
        named = [*(["quick"] if s.QUICK else []), *(["text"] if s.DATA else [])]
        named += [f"factor{given['FACTOR']}"] if s.FACTOR != 0.1 else []
        return [*named, *([f"dropout{given['DROPOUT']}"] if s.DROPOUT else [])]

    def make_text(self) -> None:
        texts.for_classes(self.settings, self.folder)

    def common(self) -> list[str]:
        return [*self.listed("all"), *DEVICES["cpu"], *PRECISIONS[self.settings.PRECISION]]

    def classifying(self) -> list[str]:
        return [*self.listed("classifying"), *self.settings.TRAIN_ARGS]

    def record(self) -> dict[str, Any]:
        s = self.settings
        numbers = ("words", "pair", "encoder_updates", "updates", "warmup", "ffn_init")
        record = {name: str(getattr(s, name.upper())) for name in numbers} | self.validated()
        record |= {"pairs": f"{s.PRETRAIN}/{s.EXAMPLES}/{s.HELD_OUT}", "data": s.DATA or ""}
        return record | records.options([*self.common(), *self.listed("pretraining"), *self.classifying()])

    def run(self, point: Point) -> Run:
        s, data = self.settings, str(self.data)
        if point is self.before:
            updates = s.ENCODER_UPDATES
            return Run({}, data, [*self.common(), *self.listed("pretraining")], updates, updates, s.ENCODER_SAVE_EVERY)
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
