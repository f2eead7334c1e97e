"""Joint byte-pair encoding. Hugging Face's tokenizers learn the merges; fastBPE applies them."""

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
"""Version of learning and applying BPE. Raise it with a change that gives the same words other BPE tokens."""
END = "</w>"
FEWEST = 2
"""Only pairs that occur this often are merged, as in subword-nmt."""


def learn(lines: Iterable[str], merges: int) -> list[str]:
    """Learn merges, most frequent first, in fastBPE's format. (fastBPE requires a third column, and ignores its value.)

    The merges equal subword-nmt's, except for the order of pairs that occur equally often.

    Args:
        lines: words with spaces between them; an item may hold several lines. The lines are read twice.
        merges: largest number of merges. There are fewer if no pair occurs twice any more.

    Raises:
        ValueError: the lines have no words, or no pair occurs twice.
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
        # The size counts merges and characters; a character at the end of a word counts separately.
        vocab_size=merges + 2 * len(characters),
        min_frequency=FEWEST,
        # Without this list, the trainer numbers the characters at ends of words in the order of a hash map, and these
        # numbers decide between pairs that occur equally often (issue 1794 of huggingface/tokenizers).
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
    """Texts in pieces of many lines, which is faster than line by line.

    Iterating raises ValueError if a line is not UTF-8.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    def __iter__(self) -> Iterator[str]:
        for path in self.paths:
            for first, (lines,) in streaming.blocks(path):
                yield "\n".join(decoded(lines, path, first))


def write(out: Path, paths: Sequence[Path], merges: int) -> None:
    """Learn the merges of some texts, and write them to a file of codes."""
    write_lines(out, learn(Texts(paths), merges))


def apply(codes: Path, paths: Sequence[Path], folder: Path, clean: Sequence[str] = (), too_long: str = "") -> None:
    """Split parallel texts into BPE tokens, clean them, and write them to a folder under the same names.

    Other arguments, and errors: see `pairs.convert`.
    """
    bpe = BPE(codes)
    outputs = [folder / path.name for path in paths]
    pairs.convert(lambda sides: [bpe.apply(side) for side in sides], paths, outputs, clean, too_long)
