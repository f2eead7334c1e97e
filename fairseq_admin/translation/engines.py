"""Three engines behind one interface: fairseq's checkpoints, CTranslate2's folders, Hugging Face's FSMT folders.

They search alike: beam search that ends when as many hypotheses as the beam is wide are complete, scores divided by the
length (end of sentence included) to a power, at most MORE units longer than the source. This file imports neither torch
nor fairseq, which CTranslate2 can do without.

    B sentences   T target units
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..errors import AdminError
from ..text.assets import Assets

if TYPE_CHECKING:
    from fairseq.data import Dictionary
    from torch import Tensor

MORE = 200
"""How many units longer than the source a translation may become: fairseq's bound for any source, plus the source."""


class Hypothesis(NamedTuple):
    """A translation, and its log-probability (natural logarithm) over its length to the length penalty."""

    score: float
    units: str
    """With spaces between them."""


class Search(NamedTuple):
    """How to search: width of the beam, power of the length that divides scores, how many hypotheses to return."""

    beam: int = 5
    length_penalty: float = 1.0
    nbest: int = 1


class Translator(abc.ABC):
    """A model that translates units into units."""

    longest: int
    """The most units a source sentence may have."""
    in_pieces: bool
    """Whether its source units are pieces of words, of which there must be the merges."""

    @abc.abstractmethod
    def __init__(self, model: Path, assets: Assets, device: str | None) -> None:
        """Load the model.

        Args:
            model: a checkpoint, or a folder.
            assets: where its dictionaries are; they learn the fingerprints of the model's own files.
            device: "cpu" or "cuda"; None: the best there is.

        Raises:
            AdminError: the model is damaged, the dictionaries are not its own, or the engine is not installed.
        """

    @abc.abstractmethod
    def translate(self, batch: Sequence[list[str]], search: Search) -> list[list[Hypothesis]]:
        """The best hypotheses of each sentence, the best first: search.nbest of them, or as many as were found.

        Args:
            batch: sentences of 1 to `longest` units, translated all at once.
        """


def choose_device(asked: str | None, cuda: bool) -> str:
    """The device asked for, or the best there is.

    Raises:
        AdminError: CUDA was asked for and is not there.
    """
    if asked == "cuda" and not cuda:
        raise AdminError("--device cuda: no CUDA device was found. Give --device cpu, or install a build for CUDA.")
    return asked or ("cuda" if cuda else "cpu")


def padded(batch: Sequence[list[str]], words: Dictionary, left: bool) -> Tensor:
    """The sentences' numbers, each ended and padded on one side to the longest. Shape (B, longest + 1)."""
    from fairseq.data.data_utils import collate_tokens

    lines = [words.encode_line(units, line_tokenizer=list, add_if_not_exist=False).long() for units in batch]
    return collate_tokens(lines, words.pad(), left_pad=left)


def spelled(numbers: Tensor, words: Dictionary) -> str:
    """The units of a hypothesis, without beginning, end and padding. Shape (T,)."""
    return words.string(numbers.tolist(), extra_symbols_to_ignore=[words.pad()])
