"""One interface for three engines: fairseq's checkpoints, CTranslate2's folders, Hugging Face's FSMT folders.

They search alike: beam search that ends when the beam is full of complete hypotheses; scores divided by a power of the
length, end of sentence included; at most MORE units longer than the source. This file imports neither torch nor
fairseq, because CTranslate2 needs neither.

    B sentences   T target units
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..errors import AdminError
from ..text.assets import Assets

if TYPE_CHECKING:
    from fairseq.data import Dictionary
    from torch import Tensor

MORE = 200
"""Units by which a translation may be longer than its source: fairseq's bound for a translation of any source."""


class Hypothesis(NamedTuple):
    """A translation, and its log-probability (natural logarithm) divided by its length to the length penalty."""

    score: float
    units: str
    """With spaces between them."""


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
    """The user's device, or else CUDA if it is there.

    Raises:
        AdminError: the user's is CUDA, and it is not there.
    """
    if device == "cuda" and not cuda:
        raise AdminError("--device cuda: no CUDA device was found. Give --device cpu, or install a build for CUDA.")
    return device or ("cuda" if cuda else "cpu")


def padded(batch: Sequence[list[str]], words: Dictionary, left: bool) -> Tensor:
    """Numbers of the sentences' units, each with its end, padded on one side. Shape (B, longest + 1)."""
    from fairseq.data.data_utils import collate_tokens

    lines = [words.encode_line(units, line_tokenizer=list, add_if_not_exist=False).long() for units in batch]
    return collate_tokens(lines, words.pad(), left_pad=left)


def spelled(numbers: Tensor, words: Dictionary) -> str:
    """Spell a hypothesis, shape (T,), as units, without beginning, end and padding."""
    return words.string(numbers.tolist(), extra_symbols_to_ignore=[words.pad()])
