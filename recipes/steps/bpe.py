"""Joint byte-pair encoding: Hugging Face's tokenizers learn the merges, and fastBPE applies them."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from fairseq_admin.text.bpe import BPE
from recipes.steps import pairs, streaming
from recipes.steps.common import decoded, write_lines

logger = logging.getLogger(__name__)

VERSION = 1
"""Version of learning and applying BPE. Raise it with a change that gives the same tokens other units."""
END = "</w>"
RARE = 2
"""A pair of units is merged if it comes as often: subword-nmt's bound."""


def learn(lines: Iterable[str], merges: int) -> list[str]:
    """The merges, most frequent first, as fastBPE reads them: a third column, of which it checks the presence only.

    They are subword-nmt's, but for the order of pairs that come equally often.

    Args:
        lines: tokens with spaces between them; one item may hold several lines. They are read twice.
        merges: how many at most; there are fewer if no pair is left that comes twice.

    Raises:
        ValueError: the lines hold no words, or none twice.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    characters: set[str] = set()
    for piece in lines:
        characters.update(piece)
    characters -= {" ", "\n"}
    if not characters:
        raise ValueError("no words to learn from; expected tokenised text. Check the files.")
    learner = Tokenizer(models.BPE(end_of_word_suffix=END))
    learner.pre_tokenizer = pre_tokenizers.Split(Regex("[ \n]"), "removed")
    trainer = trainers.BpeTrainer(
        # It counts characters, inside and at the end of a word, and merges together.
        vocab_size=merges + 2 * len(characters),
        min_frequency=RARE,
        # Left to itself it numbers the characters at the ends of words as a hash map comes, and by these numbers it
        # chooses between pairs that come equally often (issue 1794 of huggingface/tokenizers).
        special_tokens=[character + END for character in sorted(characters)],
        end_of_word_suffix=END,
        show_progress=sys.stderr.isatty(),
    )
    learner.train_from_iterator(lines, trainer)
    learnt = json.loads(learner.to_str())["model"]["merges"][:merges]
    units = [merge.split(" ") if isinstance(merge, str) else merge for merge in learnt]
    if not units:
        raise ValueError("no pair of units comes twice, so there is nothing to merge; expected more text.")
    if len(units) < merges:
        logger.info("%d merges instead of %d: no other pair of units comes twice.", len(units), merges)
    return [f"{left} {right} 1" for left, right in units]


class Texts:
    """The texts in pieces of many lines, which costs less than a line at a time.

    Iterating raises a ValueError if a line is not UTF-8.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    def __iter__(self) -> Iterator[str]:
        for path in self.paths:
            for first, (lines,) in streaming.blocks(path):
                yield "\n".join(decoded(lines, path, first))


def write(out: Path, paths: Sequence[Path], merges: int) -> None:
    """Learn the merges of some texts, and write them as codes."""
    write_lines(out, learn(Texts(paths), merges))


def apply(codes: Path, paths: Sequence[Path], folder: Path, clean: Sequence[str] = (), too_long: str = "") -> None:
    """Split texts that belong together, line by line, into units, and clean them; as files of their names in a folder.

    Args and Raises are those of `pairs.convert`.
    """
    bpe = BPE(codes)
    outputs = [folder / path.name for path in paths]
    pairs.convert(lambda sides: [bpe.apply(side) for side in sides], paths, outputs, clean, too_long)
