"""Raw text in, raw text out: a model, and what is done to the text before and after it; lines too long in pieces."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from .. import fingerprint
from ..checkpoints.checkpoint import Checkpoint
from ..errors import AdminError
from ..text.assets import Assets
from ..text.bpe import BPE, CODES, remove_bpe
from ..text.tokens import FILE, Text
from .engines import Hypothesis, Search, Translator
from .in_ctranslate2 import CTranslate2Translator
from .in_fairseq import FairseqTranslator
from .in_huggingface import HuggingFaceTranslator

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
    def load(cls, model: Path, assets: Assets, given: str = "raw", device: str | None = None) -> Pipeline:
        """The pipeline of a checkpoint, or of a folder that CTranslate2 or Hugging Face's transformers read.

        Args:
            model: the checkpoint or folder.
            assets: with text.json, codes and the dictionaries, as far as they are needed.
            given: the text is "raw", "tokens" or the model's "units", and the translation shall be.
            device: "cpu" or "cuda"; None: the best there is.

        Raises:
            AdminError: something is missing or broken.
        """
        compiled = (model / "model.bin").exists()
        checkpoint = None if model.is_dir() else Checkpoint.read(model)
        assets.expect(checkpoint.text if checkpoint else fingerprint.read(model))
        if not compiled:
            languages = assets.languages(*(_languages(checkpoint) if checkpoint else _fsmt_languages(model)))
        text = Text.read(assets.need(FILE, ", or tokens with --tokenised")) if given == "raw" else None
        if compiled:
            translator: Translator = CTranslate2Translator(model, device)
        elif checkpoint:
            translator = FairseqTranslator(checkpoint, assets, languages, device)
        else:
            translator = HuggingFaceTranslator(model, assets, languages, device)
        if translator.longest < 1:
            raise AdminError(
                f"{model} takes sentences of {translator.longest + 1} positions, of which the end takes one; expected "
                "2 or more. Its options have been changed: give the model as it was trained."
            )
        codes = None if given == "units" else assets.find(CODES)
        if not codes and given != "units" and translator.in_pieces:
            assets.need(CODES, ", the file as --codes, or units with --units")
        return cls(translator, text, BPE(codes) if codes else None)

    def translate(
        self,
        lines: list[str],
        search: Search,
        batch_tokens: int = 4096,
        first: int = 1,
        warn: Callable[[str], None] = lambda message: None,
        done: Callable[[int], object] = lambda lines: None,
    ) -> list[list[Translation]]:
        """Translate lines of text; one without words has one translation, empty.

        Args:
            lines: raw text, or tokens.
            search: how.
            batch_tokens: units in a batch at most, padding included, unless a sentence alone has more.
            first: number of the first line, for warnings.
            warn: is told of each line that is too long for the model and is translated in pieces.
            done: is told how many lines more are translated.

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
                warn(
                    f"line {number} has {len(units)} units and the model takes {self.translator.longest}: translated "
                    f"in {len(parts)} pieces."
                )
        firsts = {numbers.start for numbers in of_line if numbers}
        done(len(lines) - len(firsts))
        found: dict[int, list[Hypothesis]] = {}
        for batch in batches([len(piece) for piece in pieces], batch_tokens):
            found.update(zip(batch, self.translator.translate([pieces[i] for i in batch], search)))
            done(len(firsts.intersection(batch)))
        return [self._joined([found[i] for i in numbers]) for numbers in of_line]

    def _units(self, lines: list[str]) -> list[list[str]]:
        text = self.text
        tokens = [" ".join(line.split()) if text is None else text.tokenise(line, text.source) for line in lines]
        return [line.split(" ") if line else [] for line in (self.bpe.apply(tokens) if self.bpe else tokens)]

    def _joined(self, pieces: list[list[Hypothesis]]) -> list[Translation]:
        """A line's translations: the first of all its pieces, the second of all, ...; the mean of their scores."""
        if not pieces:
            return [Translation(0.0, "")]
        found = []
        for hypotheses in zip(*pieces):
            texts = [" ".join(hypothesis.units) for hypothesis in hypotheses]
            if self.bpe:
                texts = [remove_bpe(units) for units in texts]
            if self.text:
                texts = [self.text.detokenise(tokens) for tokens in texts]
            score = sum(hypothesis.score for hypothesis in hypotheses) / len(hypotheses)
            found.append(Translation(score, " ".join(filter(None, texts))))
        return found


def _languages(checkpoint: Checkpoint) -> tuple[str | None, str | None]:
    """Of a checkpoint, as far as it says so."""
    task = checkpoint.options.task
    if task.get("_name") != "translation":
        raise AdminError(f"{checkpoint.name} was trained for the task {task.get('_name')!r}; expected 'translation'.")
    return task.get("source_lang"), task.get("target_lang")


def _fsmt_languages(folder: Path) -> tuple[str, str]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        kind, (source, target) = config["model_type"], config["langs"]
    except OSError:
        raise AdminError(
            f"{folder} has neither model.bin nor config.json; expected a checkpoint (.pt), or a folder that "
            "CTranslate2 or transformers read."
        ) from None
    except (ValueError, KeyError, TypeError):
        kind = None
    if kind != "fsmt":
        raise AdminError(f"{path} is not that of an FSMT model; of Hugging Face's, only these are read.")
    return source, target


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
