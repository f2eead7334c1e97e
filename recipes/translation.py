"""Recipes that train a model to translate: the model's options, the translations of the test set, and their scores."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from fairseq_admin.text.tokens import Text as Tokens
from recipes.chain import Step
from recipes.processes import produce
from recipes.recipe import Recipe
from recipes.steps.common import read_lines
from recipes.steps.pairs import LONGEST
from recipes.text import Text
from recipes.training import Pipeline

POSITIONS = LONGEST + 1
"""Positions of a model. fairseq stops if a line of the validation or test set fits no batch, so those batches hold at
least this many tokens. Longer lines are skipped: `prepare` has refused or counted them (TOO_LONG)."""


class Translation(Pipeline):
    text_type = Text
    arch = "transformer_admin_18l"

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        text = self.text
        self.final, self.generated = self.folder / "model/model.pt", self.folder / "generate.txt"
        self.test = (text.raw / "test", self.settings.PAIR, text.json)
        self.task = ["--source-lang", text.source, "--target-lang", text.target]
        # With fairseq's default multiple of 8, the last sentences (up to 7) would be in no batch.
        self.batch = ["--max-tokens", str(self.machine.max_tokens), "--required-batch-size-multiple", "1"]
        self.fitting = str(max(POSITIONS, self.machine.max_tokens))
        self.validated = ["--max-tokens-valid", self.fitting, "--skip-invalid-size-inputs-valid-test"]
        self.generate_args = [*self.settings.GENERATE_ARGS, *(["--cpu"] if self.settings.DEVICE == "cpu" else [])]

    def model_options(self) -> list[str]:
        s = self.settings
        encoder, _, decoder = s.LAYERS.partition("-")
        options = ["--encoder-layers", encoder, "--decoder-layers", decoder or encoder]
        for name, value in {"embed-dim": s.WIDTH, "ffn-embed-dim": s.FFN, "attention-heads": s.HEADS}.items():
            options += [f"--encoder-{name}", str(value), f"--decoder-{name}", str(value)]
        return [*options, "--dropout", str(s.DROPOUT), "--share-all-embeddings"]

    def score_steps(self) -> Iterator[Step]:
        s, text, folder = self.settings, self.text, self.folder
        settings: dict[str, Any] = {"beam": str(s.BEAM), "lenpen": f"{s.LENPEN:g}", "options": self.generate_args}
        yield Step("generate", folder, (self.generated,), self._generate, (self.final,), settings)
        yield Step(
            "score", folder, (self.score,), self._score, (self.generated, *text.both(text.raw, "test")),
            {"compounds": s.COMPOUNDS, "average": s.AVERAGE},
            after=(*text.both(text.words, "test"), *text.both(text.folder / "bpe", "test")),
        )  # fmt: skip

    def _score(self) -> None:
        from recipes.steps import score  # imports sacreBLEU

        s, text = self.settings, self.text
        raw, words, units = (folder / "test" for folder in (text.raw, text.words, text.folder / "bpe"))
        scores = score.translations(self.folder, Tokens.read(text.json), raw, words, units, s.COMPOUNDS)
        self.keep_scores(scores, beam=s.BEAM, lenpen=f"{s.LENPEN:g}", generate_args=" ".join(self.generate_args))

    def _generate(self) -> None:
        s = self.settings
        command = [sys.executable, "-m", "fairseq_cli.generate", str(self.text.binary), *self.user_dir]
        command += ["--path", str(self.final), "--gen-subset", "test", *self.task]
        command += ["--beam", str(s.BEAM), "--lenpen", f"{s.LENPEN:g}", *self.batch, "--max-tokens", self.fitting]
        command += ["--skip-invalid-size-inputs-valid-test", *self.generate_args]
        produce(command, self.generated, sentences=len(read_lines(self.text.both(self.text.raw, "test")[0])))
