"""The recipe of a language model: its text (Python's own documentation), the model's options, and the perplexity."""

from __future__ import annotations

import platform
import re
import sys
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from recipes.chain import Step
from recipes.lm import python_docs
from recipes.processes import produce
from recipes.recipe import Recipe
from recipes.steps import bpe
from recipes.steps.common import read_lines
from recipes.text import SPLITS, binarise
from recipes.training import Pipeline

RESULT = re.compile(r"(?:^|[:| ])Loss \(base 2\): ([0-9.]+), Perplexity: ([0-9.]+|inf)$")
SIGNATURE = "perplexity a word, test set, as fairseq-eval-lm counts words with BPE joined"


def perplexity(lines: list[str]) -> str:
    """The perplexity in the output of fairseq-eval-lm.

    Raises:
        ValueError: the output has no perplexity, or several.
    """
    perplexities = [match[2] for line in lines if (match := RESULT.search(line))]
    if len(perplexities) != 1:
        raise ValueError(
            f"found {len(perplexities)} perplexities in fairseq-eval-lm's output; expected one. Remove it, try again."
        )
    return perplexities[0]


class Documentation:
    """The recipe's text, with the attributes of `text.Text`."""

    def __init__(self, recipe: Recipe) -> None:
        self.settings, self.folder, self.binary = recipe.settings, recipe.text, recipe.text / "bin"
        self.binarised = self.binary / "dict.txt"
        self.goals, self.assets = (self.binarised,), ()
        self.library = Path(self.settings.LIBRARY or sysconfig.get_paths()["stdlib"])

    def record(self) -> dict[str, Any]:
        python = {"merges": str(self.settings.MERGES), "python": platform.python_version()}
        return {**python, "library": python_docs.describe(self.library)}

    def steps(self) -> Iterator[Step]:
        s, text = self.settings, self.folder
        words = tuple(text / "tok" / split for split in SPLITS)
        library = {"library": self.record()["library"]["sha256"]}
        yield Step("words", text, words, partial(python_docs.write, text / "tok", self.library), settings=library)
        codes = text / "codes"
        learn = partial(bpe.write, codes, words[:1], s.MERGES)
        yield Step("codes", text, (codes,), learn, words[:1], {"merges": s.MERGES}, bpe.VERSION)
        units = tuple(text / "bpe" / split for split in SPLITS)
        for read, written in zip(words, units):
            program = partial(bpe.apply, codes, [read], text / "bpe")
            yield Step(f"bpe {read.name}", text, (written,), program, (read, codes), version=bpe.VERSION)
        program = partial(binarise, self.binary, f"{text}/bpe/", "--only-source")
        yield Step("bin", text, (self.binarised,), program, units)


class LanguageModel(Pipeline):
    text_type = Documentation
    arch = "transformer_lm_admin"
    task = ["--task", "language_modeling"]

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.batch = ["--tokens-per-sample", str(self.settings.CONTEXT), "--max-tokens", str(self.machine.max_tokens)]
        self.generated, self.final = self.folder / "eval.txt", self.folder / "model.pt"

    def model_options(self) -> list[str]:
        s = self.settings
        sizes = {"layers": s.LAYERS, **{f"{name}-dim": s.WIDTH for name in ("embed", "input", "output")}}
        sizes |= {"ffn-embed-dim": s.FFN, "attention-heads": s.HEADS}
        options = [word for name, value in sizes.items() for word in (f"--decoder-{name}", str(value))]
        return [*options, "--dropout", str(s.DROPOUT), "--share-decoder-input-output-embed"]

    def score_steps(self) -> Iterator[Step]:
        yield Step("generate", self.folder, (self.generated,), self._evaluate, (self.final,))
        average = {"average": self.settings.AVERAGE}
        yield Step("score", self.folder, (self.score,), self._score, (self.generated,), average)

    def _evaluate(self) -> None:
        """Evaluate the test set. With BPE undone, the perplexity is per word, whatever MERGES is."""
        command = [sys.executable, "-m", "fairseq_cli.eval_lm", str(self.text.binary), *self.user_dir, "--path"]
        command += [str(self.final), "--gen-subset", "test", "--post-process", "@@ ", *self.batch]
        command += ["--cpu", "--num-workers", "0"]
        produce(command, self.generated)

    def _score(self) -> None:
        score = perplexity(read_lines(self.generated))
        self.keep_scores({"perplexity": score, "signature": SIGNATURE})
