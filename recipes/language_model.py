"""The language model's recipe: Python's own documentation, training, average, and the perplexity of the test set."""

from __future__ import annotations

import platform
import re
import sys
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from recipes import machines
from recipes.chain import Step
from recipes.lm import python_docs
from recipes.processes import produce
from recipes.recipe import Recipe
from recipes.steps import bpe
from recipes.steps.common import read_lines
from recipes.text import SPLITS, binarise
from recipes.training import Model, Run

RESULT = re.compile(r"(?:^|[:| ])Loss \(base 2\): ([0-9.]+), Perplexity: ([0-9.]+|inf)$")
SIGNATURE = "perplexity a word, test set, as fairseq-eval-lm counts words with BPE joined"


def perplexity(lines: list[str]) -> str:
    """What fairseq-eval-lm printed.

    Raises:
        ValueError: it printed none, or more than one.
    """
    found = [match[2] for line in lines if (match := RESULT.search(line))]
    if len(found) != 1:
        raise ValueError(
            f"found {len(found)} perplexities in fairseq-eval-lm's output; expected one. Remove it and evaluate again."
        )
    return found[0]


class LanguageModel:
    def __init__(self, recipe: Recipe) -> None:
        s = recipe.settings
        self.recipe, self.settings, self.text, self.folder = recipe, s, recipe.text, recipe.run
        self.machine = machines.plan(s)
        self.library = Path(s.LIBRARY or sysconfig.get_paths()["stdlib"])
        self.batch = ["--tokens-per-sample", str(s.CONTEXT), "--max-tokens", str(self.machine.max_tokens)]
        self.binary, self.binarised = self.text / "bin", self.text / "bin/dict.txt"
        self.evaluated, self.score = self.folder / "eval.txt", self.folder / "score.json"
        self.run = Run(recipe, self._model(), self.machine)
        self.goals = {
            "prepare": (self.binarised,),
            "train": (self.run.trained,),
            "average": (self.run.model.final,),
            "generate": (self.evaluated,),
            "score": (self.score,),
            "all": (self.folder / "report.html",),
        }

    def record(self) -> dict[str, Any]:
        """What the text was made from."""
        python = {"merges": str(self.settings.MERGES), "python": platform.python_version()}
        return {**python, "library": python_docs.describe(self.library)}

    def _model(self) -> Model:
        s, width = self.settings, str(self.settings.WIDTH)
        options = ["--decoder-layers", str(s.LAYERS)]
        for name in ("embed", "input", "output"):
            options += [f"--decoder-{name}-dim", width]
        options += ["--decoder-ffn-embed-dim", str(s.FFN), "--decoder-attention-heads", str(s.HEADS)]
        return Model(
            binary=self.binary,
            binarised=self.binarised,
            task=["--task", "language_modeling"],
            arch="transformer_lm_admin",
            options=[*options, "--dropout", str(s.DROPOUT), "--share-decoder-input-output-embed"],
            batch=self.batch,
            validated=[],
            final=self.folder / "model.pt",
        )

    def steps(self) -> Iterator[Step]:
        yield from self._text_steps()
        yield from self.run.steps()
        model = self.run.model.final
        yield Step(
            "generate", self.folder, (self.evaluated,), self._evaluate, (model,), title="the test set's perplexity"
        )
        yield Step(
            "score", self.folder, (self.score,), self._score, (self.evaluated,), {"average": self.settings.AVERAGE}
        )
        yield from self.run.report_steps(self.score)

    def _text_steps(self) -> Iterator[Step]:
        s, text = self.settings, self.text
        words = tuple(text / "tok" / split for split in SPLITS)
        library = {"library": self.record()["library"]["sha256"]}
        program = partial(python_docs.write, text / "tok", self.library)
        yield Step("words", text, words, program, settings=library, title="Python's own documentation")
        codes = text / "codes"
        learn = partial(bpe.write, codes, words[:1], s.MERGES)
        yield Step("codes", text, (codes,), learn, words[:1], {"merges": s.MERGES}, title=f"learn {s.MERGES} merges")
        units = tuple(text / "bpe" / split for split in SPLITS)
        for read, written in zip(words, units):
            apply = partial(bpe.apply, codes, [read], text / "bpe")
            title = f"BPE tokens of {read.name}"
            yield Step(f"bpe {read.name}", text, (written,), apply, (read, codes), title=title)
        prefixes = [word for split, path in zip(SPLITS, units) for word in (f"--{split}pref", path)]
        program = partial(binarise, self.binary, "--only-source", *prefixes)
        yield Step("bin", text, (self.binarised,), program, units, title="fairseq's binary data")

    def _evaluate(self) -> None:
        """Joining BPE's tokens makes the perplexity one of words, whatever MERGES is."""
        command = [sys.executable, "-m", "fairseq_cli.eval_lm", str(self.binary), *self.run.user_dir, "--path"]
        command += [str(self.run.model.final), "--gen-subset", "test", "--post-process", "@@ ", *self.batch]
        command += ["--cpu", "--num-workers", "0"]
        produce(command, self.evaluated)

    def _score(self) -> None:
        found = perplexity(read_lines(self.evaluated))
        self.run.record({"perplexity": found, "signature": SIGNATURE})
