"""Three engines behind one interface: fairseq's checkpoints, CTranslate2's folders, Hugging Face's FSMT folders.

They search alike: beam search that ends when as many hypotheses as the beam is wide are complete, scores divided by the
length (end of sentence included) to a power, at most MORE units longer than the source.

    B sentences   T target units
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from fairseq.data import Dictionary
from torch import Tensor

from ..errors import AdminError

MORE = 200
"""How many units longer than the source a translation may become: fairseq's bound for any source, plus the source."""


class Hypothesis(NamedTuple):
    """A translation in units, and its log-probability (natural logarithm) over its length to the length penalty."""

    score: float
    units: list[str]


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
    def translate(self, batch: Sequence[list[str]], search: Search) -> list[list[Hypothesis]]:
        """The best hypotheses of each sentence, the best first: search.nbest of them, or as many as were found.

        Args:
            batch: sentences of 1 to `longest` units, translated all at once.
        """


def chosen(device: str | None, cuda: bool) -> str:
    """The device asked for, or the best there is.

    Raises:
        AdminError: CUDA was asked for and is not there.
    """
    if device == "cuda" and not cuda:
        raise AdminError("--device cuda: no CUDA device was found. Give --device cpu, or install a build for CUDA.")
    return device or ("cuda" if cuda else "cpu")


def padded(batch: Sequence[list[str]], words: Dictionary, left: bool) -> Tensor:
    """The sentences' numbers, each ended and padded on one side to the longest. Shape (B, longest + 1)."""
    tokens = torch.full((len(batch), max(map(len, batch)) + 1), words.pad())
    for row, units in zip(tokens, batch):
        numbers = torch.tensor([*map(words.index, units), words.eos()])
        row[len(row) - len(numbers) if left else 0 :][: len(numbers)] = numbers
    return tokens


def spelled(numbers: list[int], words: Dictionary) -> list[str]:
    """The units of a hypothesis, without beginning, end and padding."""
    return [words[number] for number in numbers if number not in (words.bos(), words.eos(), words.pad())]


def missing(package: str, folder: Path, packages: str) -> str:
    """What to say where a folder's engine is not installed."""
    return f"{folder} needs {package}, which is not installed. Run pip install {packages}."
