"""A translation recipe: text, training, average, fold, translations of the test set, sacreBLEU, summary and report."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from fairseq_admin.text.tokens import Text as Tokens
from recipes import machines
from recipes.chain import Step
from recipes.processes import produce
from recipes.recipe import Recipe
from recipes.text import Text
from recipes.training import Model, Run

POSITIONS = 1024
"""Of a model. fairseq ends over a line of validation or test that fits no batch, so theirs hold at least as many
tokens; lines that are too long for that, prepare has refused or counted (TOO_LONG), and they are skipped."""


class Pipeline:
    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.settings = recipe, recipe.settings
        self.machine = machines.plan(recipe.settings)
        self.text = Text(recipe)
        self.run = Run(recipe, self._model(), self.machine)
        self.folder = recipe.run
        self.generated, self.score = self.folder / "generate.txt", self.folder / "score.json"
        self.goals = {
            "prepare": self.text.goals,
            "train": (self.run.trained,),
            "average": (self.run.model.final,),
            "generate": (self.generated,),
            "score": (self.score,),
            "all": (self.folder / "report.html",),
        }

    def record(self) -> dict[str, Any]:
        return self.text.record()

    def _model(self) -> Model:
        s, text = self.settings, self.text
        stacks = {
            "layers": (s.ENCODER_LAYERS or s.LAYERS, s.DECODER_LAYERS or s.LAYERS), "embed-dim": (s.WIDTH,) * 2,
            "ffn-embed-dim": (s.FFN,) * 2, "attention-heads": (s.HEADS,) * 2,
        }  # fmt: skip
        options = [
            word
            for name, values in stacks.items()
            for stack, value in zip(("encoder", "decoder"), values)
            for word in (f"--{stack}-{name}", str(value))
        ]
        options += ["--dropout", str(s.DROPOUT)]
        for name in ("attention", "activation"):
            value = getattr(s, f"{name.upper()}_DROPOUT")
            options += [f"--{name}-dropout", str(value)] if value is not None else []
        return Model(
            binary=text.binary,
            binarised=text.binarised,
            task=self.task(),
            arch="transformer_admin_18l",
            options=[*options, "--share-all-embeddings"],
            batch=self.batch(),
            validated=["--max-tokens-valid", self._fitting(), "--skip-invalid-size-inputs-valid-test"],
            final=self.recipe.run / "model/model.pt",
            assets=text.assets,
        )

    def task(self) -> list[str]:
        source, target = self.settings.PAIR.split("-")
        return ["--source-lang", source, "--target-lang", target]

    def batch(self) -> list[str]:
        """A multiple of 1: with fairseq's own, 8, the last sentences (up to 7) fall in no batch: they are lost."""
        return ["--max-tokens", str(self.machine.max_tokens), "--required-batch-size-multiple", "1"]

    def _fitting(self) -> str:
        return str(max(POSITIONS, self.machine.max_tokens))

    def steps(self) -> Iterator[Step]:
        s, text = self.settings, self.text
        yield from text.steps()
        yield from self.run.steps()
        settings: dict[str, Any] = {"beam": str(s.BEAM), "lenpen": f"{s.LENPEN:g}", "options": list(s.GENERATE_ARGS)}
        reads = (self.run.model.final,)
        yield Step(
            "generate", self.folder, (self.generated,), self._generate, reads, settings,
            title="translate the test set",
        )  # fmt: skip
        yield Step(
            "score", self.folder, (self.score,), self._score, (self.generated, *text.both(text.raw, "test")),
            {"compounds": s.COMPOUNDS, "average": s.AVERAGE},
            after=(*text.both(text.words, "test"), *text.both(text.folder / "bpe", "test")),
        )  # fmt: skip
        yield from self.run.report_steps(self.score, text.raw / "test", s.PAIR)

    def _score(self) -> None:
        from recipes.steps import score  # with sacreBLEU

        s, text = self.settings, self.text
        raw, words, units = (folder / "test" for folder in (text.raw, text.words, text.folder / "bpe"))
        scores = score.translations(self.folder, Tokens.read(text.json), raw, words, units, s.COMPOUNDS)
        made = {"generate_args": " ".join(s.GENERATE_ARGS)} if s.GENERATE_ARGS else {}
        self.run.record(scores, beam=s.BEAM, lenpen=f"{s.LENPEN:g}", **made)

    def _generate(self) -> None:
        s = self.settings
        command = [sys.executable, "-m", "fairseq_cli.generate", str(self.text.binary), *self.run.user_dir]
        command += ["--path", str(self.run.model.final), "--gen-subset", "test", *self.task()]
        command += ["--beam", str(s.BEAM), "--lenpen", f"{s.LENPEN:g}", *self.batch(), "--max-tokens", self._fitting()]
        command += ["--skip-invalid-size-inputs-valid-test", *s.GENERATE_ARGS]
        produce(command, self.generated)
