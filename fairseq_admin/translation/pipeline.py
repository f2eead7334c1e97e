"""Translate raw text to raw text: tokenise, split into units, translate, join. Long lines are cut into pieces."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from .. import register
from ..errors import AdminError
from ..text.assets import Assets
from ..text.bpe import BPE, CODES, remove_bpe
from ..text.tokens import FILE, Text
from .engines import Hypothesis, Search, Translator

SENTENCE_ENDS = {".", "!", "?", "...", "…", "。", "！", "？", "।", "؟", "۔"}
CLOSING = {'"', "&quot;", "'", "&apos;", ")", "]", "&#93;", "”", "“", "»", "’"}


class Pipeline(NamedTuple):
    """A model, and how its text is prepared."""

    translator: Translator
    text: Text | None
    """None: text and translation are tokens."""
    bpe: BPE | None
    """None: the tokens are the model's units."""

    @classmethod
    def load(cls, model: Path, assets: Assets, kind: str = "raw", device: str | None = None) -> Pipeline:
        """Load the pipeline of a checkpoint, or of a folder for CTranslate2.

        Args:
            model: the checkpoint or folder.
            assets: text.json, codes and dictionaries, if the model needs them.
            kind: "raw", "tokens" or "units": the kind of text and translation.
            device: "cpu" or "cuda"; None: CUDA if it is there.

        Returns:
            The pipeline.

        Raises:
            AdminError: a file is missing or broken.
        """
        translator = _engine(model)(model, assets, device)
        if translator.longest < 1:
            raise AdminError(f"{model} has {translator.longest + 1} positions; 2 are needed to translate one unit.")
        text = Text.read(assets.need(FILE, ", or tokens with --tokenised")) if kind == "raw" else None
        bpe = None
        if kind != "units" and (translator.in_pieces or assets.find(CODES)):
            bpe = BPE(assets.need(CODES, ", the file as --codes, or units with --units"))
        return cls(translator, text, bpe)

    def translate(
        self,
        lines: list[str],
        search: Search,
        batch_tokens: int = 4096,
        first: int = 1,
        done: Callable[[int], object] = lambda pieces: None,
    ) -> list[list[Hypothesis]]:
        """Translate lines of text. A line without words has one empty translation.

        A line that is too long for the model is translated in pieces, with a note on standard error.

        Args:
            lines: raw text, or tokens.
            search: how to search.
            batch_tokens: largest number of units in a batch, padding included; a longer sentence is a batch by itself.
            first: number of the first line, for notes.
            done: called after each batch with its number of pieces.

        Returns:
            For each line up to search.nbest translations, the best first.
        """
        pieces: list[list[str]] = []
        of_line: list[range] = []
        for number, units in enumerate(self._units(lines), first):
            parts = split(units, self.translator.longest)
            of_line.append(range(len(pieces), len(pieces) + len(parts)))
            pieces += parts
            if len(parts) > 1:
                tqdm.write(
                    f"fairseq-admin: line {number} has {len(units)} units and the model takes "
                    f"{self.translator.longest}: translated in {len(parts)} pieces.",
                    file=sys.stderr,
                )
        hypotheses: dict[int, list[Hypothesis]] = {}
        for batch in batches([len(piece) for piece in pieces], batch_tokens):
            hypotheses.update(zip(batch, self.translator.translate([pieces[i] for i in batch], search)))
            done(len(batch))
        return [self._joined([hypotheses[i] for i in numbers]) for numbers in of_line]

    def _units(self, lines: list[str]) -> list[list[str]]:
        text = self.text
        tokens = [" ".join(line.split()) if text is None else text.tokenise(line, text.source) for line in lines]
        return [line.split(" ") if line else [] for line in (self.bpe.apply(tokens) if self.bpe else tokens)]

    def _joined(self, pieces: list[list[Hypothesis]]) -> list[Hypothesis]:
        """Join the best hypotheses of all pieces, then the second best, and so on. Scores are the pieces' mean."""
        if not pieces:
            return [Hypothesis(0.0, "")]
        translations = []
        for hypotheses in zip(*pieces):
            score = sum(hypothesis.score for hypothesis in hypotheses) / len(hypotheses)
            translations.append(Hypothesis(score, " ".join(filter(None, map(self._raw, hypotheses)))))
        return translations

    def _raw(self, hypothesis: Hypothesis) -> str:
        tokens = remove_bpe(hypothesis.text) if self.bpe else hypothesis.text
        return self.text.detokenise(tokens) if self.text else tokens


def _engine(model: Path) -> type[Translator]:
    """Choose a model's engine. Only its own packages are imported."""
    if (model / "model.bin").exists():
        from .in_ctranslate2 import CTranslate2Translator

        return CTranslate2Translator
    if model.is_dir():
        raise AdminError(
            f"{model} has neither model.pt nor model.bin; expected a checkpoint (.pt), a recipe's folder model, or a "
            "folder for CTranslate2. Hugging Face's transformers translate with the folder that they read."
        )
    register()
    from .in_fairseq import FairseqTranslator

    return FairseqTranslator


def split(units: list[str], longest: int) -> list[list[str]]:
    """Cut a line into pieces.

    A piece ends with the last sentence that ends within the bound, otherwise with the last word, otherwise anywhere.

    Args:
        units: the units of the line.
        longest: largest number of units in a piece.

    Returns:
        The pieces. A line without units gives no piece.
    """
    pieces = []
    while len(units) > longest:
        words = [n for n in range(1, longest + 1) if not units[n - 1].endswith("@@")]
        sentences = [n for n in words if units[n - 1] in SENTENCE_ENDS]
        cut = (sentences or words or [longest])[-1]
        while cut < longest and units[cut] in CLOSING:
            cut += 1
        pieces.append(units[:cut])
        units = units[cut:]
    return [*pieces, units] if units else pieces


def batches(lengths: list[int], tokens: int) -> Iterator[list[int]]:
    """Group sentences of similar length into batches, the longest first.

    Args:
        lengths: number of units of each sentence.
        tokens: largest number of units in a batch, padding included; a longer sentence is a batch by itself.

    Yields:
        Indices of the sentences of a batch, from 0.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    while order:
        size = max(1, tokens // lengths[order[0]])
        yield order[:size]
        order = order[size:]
