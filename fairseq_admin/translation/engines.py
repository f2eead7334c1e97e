"""One interface for two engines: fairseq's checkpoints and CTranslate2's folders.

They search alike: beam search that ends when the beam is full of complete hypotheses; scores divided by a power of the
length, end of sentence included; at most MORE units longer than the source. This file imports neither torch nor
fairseq, because CTranslate2 needs neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from ..errors import AdminError
from ..text.assets import Assets

MORE = 200
"""Units by which a translation may be longer than its source: fairseq's bound for a translation of any source."""


class Hypothesis(NamedTuple):
    """A translation and its score: log-probability (natural logarithm) divided by length ** length_penalty."""

    score: float
    text: str
    """From an engine: units, with spaces between them. From the pipeline: what the user reads."""


class Search(NamedTuple):
    """Width of the beam, power of the length that divides scores, number of hypotheses to return."""

    beam: int = 5
    length_penalty: float = 1.0
    nbest: int = 1


class Translator(Protocol):
    """A model that translates units into units."""

    longest: int
    """Largest number of units in a source sentence."""
    in_pieces: bool
    """Whether the source units are pieces of words, so that merges are needed."""

    def __init__(self, model: Path, assets: Assets, device: str | None) -> None:
        """Load the model.

        Args:
            model: a checkpoint, or a folder.
            assets: its dictionaries; the engine stores the model's fingerprints in them.
            device: "cpu" or "cuda"; None: CUDA if it is there.

        Raises:
            AdminError: the model is damaged, the dictionaries are not its own, or the engine is not installed.
        """

    def translate(self, batch: Sequence[list[str]], search: Search) -> list[list[Hypothesis]]:
        """Translate a batch.

        Args:
            batch: sentences of 1 to `longest` units.
            search: how to search.

        Returns:
            For each sentence up to search.nbest hypotheses, the best first.
        """


def choose_device(device: str | None, cuda: bool) -> str:
    """Choose the device: the one that the user named, otherwise CUDA if it is there.

    Args:
        device: the device that the user named. None: the user named none.
        cuda: whether CUDA is there.

    Returns:
        "cpu" or "cuda".

    Raises:
        AdminError: the user named CUDA, and it is not there.
    """
    if device == "cuda" and not cuda:
        raise AdminError("--device cuda: no CUDA device was found. Give --device cpu, or install a build for CUDA.")
    return device or ("cuda" if cuda else "cpu")
