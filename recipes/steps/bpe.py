"""Joint byte-pair encoding: Hugging Face's tokenizers learn it, fastBPE applies it.

    python -m recipes.steps.bpe learn 2000 tok/train.de tok/train.en -o codes
    python -m recipes.steps.bpe apply codes tok/test.de tok/test.en -o bpe

Two programs, because fastBPE's Python binding is quick but cannot learn. With --lengths and --ratio, the pair of texts
is cleaned after it is split, as Moses' clean-corpus-n.perl does it.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from recipes.steps import bar, cleaning, lengths, streaming
from recipes.steps.cleaning import Cleaner
from recipes.steps.common import run, write_lines, writing
from recipes.steps.lengths import Long
from recipes.steps.text import BPE

logger = logging.getLogger(__name__)

END = "</w>"
READINGS = 2
RARE = 2
"""A pair of units is merged if it comes as often: subword-nmt's bound."""


def learn(lines: list[str] | Texts, merges: int) -> list[str]:
    """The merges, most frequent first, as fastBPE reads them: a third column, of which it checks the presence only.

    They are subword-nmt's, but for the order of pairs that come equally often.

    Args:
        lines: tokens with spaces between them; one item may hold several lines. They are read READINGS times.
        merges: how many at most; there are fewer if no pair is left that comes twice.

    Raises:
        ValueError: the lines hold no words.
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
    found = [merge.split(" ") if isinstance(merge, str) else merge for merge in learnt]
    if len(found) < merges:
        logger.info("%d merges instead of %d: no other pair of units comes twice.", len(found), merges)
    return [f"{left} {right} 1" for left, right in found]


class Texts:
    """The texts in pieces of many lines, which costs less than a line at a time.

    Iterating raises a ValueError if a file is missing or a line is not UTF-8.
    """

    def __init__(self, paths: Iterable[str | Path]) -> None:
        self.paths = list(paths)
        self.readings = 0

    def __iter__(self) -> Iterator[str]:
        self.readings += 1
        with bar.texts(f"learn, reading {self.readings} of {READINGS}", *self.paths) as shown:
            for path in self.paths:
                for block in streaming.blocks(path, shown=shown):
                    (lines,), _ = block.text()
                    yield "\n".join(lines)


class Units(NamedTuple):
    """A block's units.

    Attributes:
        sides: either side's lines, as they are written.
        kept: how many these are.
        dropped: how many were dropped, by reason.
        long: those that are too long for the model, if they were looked for.
    """

    sides: list[bytes]
    kept: int
    dropped: Counter[str]
    long: list[Long]


class Splitter:
    """From a block of tokens to units."""

    def __init__(self, codes: BPE, cleaner: Cleaner | None, measure: bool) -> None:
        self.codes, self.cleaner, self.measure = codes, cleaner, measure

    def __call__(self, block: streaming.Block) -> Units:
        """Its units.

        Raises:
            ValueError: a line is not UTF-8.
        """
        sides = [self.codes.apply(side) for side in block.text()[0]]
        numbers = list(range(block.first, block.first + len(sides[0])))
        dropped: Counter[str] = Counter()
        if self.cleaner:
            cleaned = [self.cleaner.cleaned(*pair) for pair in zip(*sides)]
            dropped.update(reason for reason in cleaned if isinstance(reason, str))
            numbers = [number for number, pair in zip(numbers, cleaned) if not isinstance(pair, str)]
            sides = [list(side) for side in zip(*(pair for pair in cleaned if not isinstance(pair, str)))] or [[], []]
        long = []
        if self.measure:
            for path, side in zip(block.paths, sides):
                long += lengths.too_long(path, zip(numbers, side))
        written = ["".join(f"{line}\n" for line in side).encode() for side in sides]
        return Units(written, len(sides[0]), dropped, long)

    def knowing(self, block: streaming.Block) -> Splitter:
        """This one, once the corpus's first block is known: cleaning depends on the first pair."""
        first = [lines[:1] for lines in block.lines]
        sides = streaming.Block(block.paths, block.first, tuple(first)).text()[0]
        cleaner = self.cleaner and self.cleaner.knowing(*(side[0] for side in sides))
        return Splitter(self.codes, cleaner, self.measure)


def split(splitter: Splitter, paths: list[Path], folder: Path, workers: int, skip: bool) -> None:
    """Split texts that belong together, line by line, into units, and clean them.

    Raises:
        ValueError: a text is missing or not UTF-8, they have not as many lines each, nothing is left of them, or a line
            is too long for the model and not to be skipped.
    """
    for block in streaming.blocks(*paths):
        splitter = splitter.knowing(block)
        break
    kept, long = 0, []
    dropped: Counter[str] = Counter()
    with writing(*(folder / path.name for path in paths)) as files:
        with bar.texts(f"apply to {' '.join(map(str, paths))}", *paths) as shown:
            for done in streaming.parallel(splitter, streaming.blocks(*paths, shown=shown), workers):
                for file, side in zip(files, done.sides):
                    file.write(side)
                kept += done.kept
                dropped += done.dropped
                long += done.long
        lengths.settle(long, skip)
        cleaning.report(" ".join(map(str, paths)), kept, dropped)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    learning = commands.add_parser("learn")
    learning.add_argument("merges", type=int)
    learning.add_argument("texts", nargs="+")
    applying = commands.add_parser("apply")
    applying.add_argument("codes", type=Path)
    applying.add_argument("texts", nargs="+", type=Path)
    cleaning.add_options(applying)
    applying.add_argument(
        "--too-long", choices=("refuse", "skip"), help="look for lines that are too long for the model, and do what"
    )
    applying.add_argument("--workers", type=streaming.workers, default=streaming.cores())
    learning.add_argument("-o", "--out", type=Path, required=True, help="the codes, a file")
    applying.add_argument("-o", "--out", type=Path, required=True, help="a folder for files of the texts' names")
    args = parser.parse_args()

    if args.command == "learn":
        write_lines(args.out, learn(Texts(args.texts), args.merges))
        return
    cleaner = cleaning.cleaner(args)
    if cleaner and len(args.texts) != 2:
        raise ValueError(f"--lengths cleans a pair of texts; found {len(args.texts)}. Give the two sides of one.")
    codes = BPE(args.codes)
    for paths in [args.texts] if cleaner else [[path] for path in args.texts]:
        splitter = Splitter(codes, cleaner, measure=args.too_long is not None)
        split(splitter, paths, args.out, args.workers, skip=args.too_long == "skip")


if __name__ == "__main__":
    run(main)
