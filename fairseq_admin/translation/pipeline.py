"""Raw text in, raw text out: a model, and what is done to the text before and after it; lines too long in pieces."""

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


class Translation(NamedTuple):
    """One translation of a line."""

    score: float
    text: str


class Pipeline(NamedTuple):
    """A model and what is done to the text before and after it."""

    translator: Translator
    text: Text | None
    """None: the text is tokens already, and the translation is."""
    bpe: BPE | None
    """None: the tokens are the model's units."""

    @classmethod
    def load(cls, model: Path, assets: Assets, kind: str = "raw", device: str | None = None) -> Pipeline:
        """The pipeline of a checkpoint, or of a folder that CTranslate2 or Hugging Face's transformers read.

        Args:
            model: the checkpoint or folder.
            assets: with text.json, codes and the dictionaries, as far as they are needed.
            kind: the text is "raw", "tokens" or the model's "units", and the translation shall be.
            device: "cpu" or "cuda"; None: the best there is.

        Raises:
            AdminError: something is missing or broken.
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
    ) -> list[list[Translation]]:
        """Translate lines of text; one without words has one translation, empty.

        A line that is too long for the model is translated in pieces, with a note on standard error.

        Args:
            lines: raw text, or tokens.
            search: how.
            batch_tokens: units in a batch at most, padding included, unless a sentence alone has more.
            first: number of the first line, for notes.
            done: is told after each batch how many pieces were in it.

        Returns:
            The best translations of each line, the best first, up to search.nbest.
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

    def _joined(self, pieces: list[list[Hypothesis]]) -> list[Translation]:
        """A line's translations: the first of all its pieces, the second of all, ...; the mean of their scores."""
        if not pieces:
            return [Translation(0.0, "")]
        translations = []
        for hypotheses in zip(*pieces):
            score = sum(hypothesis.score for hypothesis in hypotheses) / len(hypotheses)
            translations.append(Translation(score, " ".join(filter(None, map(self._raw, hypotheses)))))
        return translations

    def _raw(self, hypothesis: Hypothesis) -> str:
        tokens = remove_bpe(hypothesis.units) if self.bpe else hypothesis.units
        return self.text.detokenise(tokens) if self.text else tokens


def _engine(model: Path) -> type[Translator]:
    """What translates with a model; each engine's packages are imported only where it is used."""
    if (model / "model.bin").exists():
        from .in_ctranslate2 import CTranslate2Translator

        return CTranslate2Translator
    if (model / "config.json").exists():
        from .in_huggingface import HuggingFaceTranslator

        return HuggingFaceTranslator
    if model.is_dir():
        raise AdminError(
            f"{model} has neither model.bin nor config.json; expected a checkpoint (.pt), or a folder that "
            "CTranslate2 or transformers read."
        )
    register()
    from .in_fairseq import FairseqTranslator

    return FairseqTranslator


def split(units: list[str], longest: int) -> list[list[str]]:
    """A sentence in pieces of at most `longest` units; none if it has no units.

    A piece ends with the last sentence that ends within the bound, or else the last word, or else anywhere.
    """
    pieces = []
    while len(units) > longest:
        words = [n for n in range(1, longest + 1) if not units[n - 1].endswith("@@")]
        sentences = [n for n in words if units[n - 1] in SENTENCE_ENDS]
        cut = (sentences or words or [longest])[-1]
        while sentences and cut < longest and units[cut] in CLOSING:
            cut += 1
        pieces.append(units[:cut])
        units = units[cut:]
    return [*pieces, units] if units else pieces


def batches(lengths: list[int], tokens: int) -> Iterator[list[int]]:
    """Numbers of sentences to translate together: of like length, the longest first, and every one once.

    Args:
        lengths: units a sentence.
        tokens: units a batch at most, padding included; a longer sentence is a batch of its own.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    while order:
        size = max(1, tokens // lengths[order[0]])
        yield order[:size]
        order = order[size:]
