"""Tokenise one split of a parallel text, as text.json says; pair by pair, on all cores.

    D=runs/demo/data; python -m recipes.steps.tokenise $D/text.json $D/raw/train $D/tok/train --drop-empty

reads raw/train.de and raw/train.en, writes tok/train.de and tok/train.en, line for line. With --drop-empty, or with
--lengths and --ratio as Moses' clean-corpus-n.perl has them, training text is cleaned besides.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from recipes.steps import bar, cleaning, streaming
from recipes.steps.cleaning import EMPTY, Cleaner
from recipes.steps.common import run, writing
from recipes.steps.text import Text


class Done(NamedTuple):
    """A block's tokens.

    Attributes:
        sides: either side's lines, as they are written.
        kept: how many pairs these are.
        dropped: how many were dropped, by reason.
        carriage_returns: lines of either side that ended with CRLF.
    """

    sides: list[bytes]
    kept: int
    dropped: Counter[str]
    carriage_returns: list[int]


class Tokeniser:
    """From a block of raw pairs to tokens."""

    def __init__(self, text: Text, drop_empty: bool, cleaner: Cleaner | None) -> None:
        self.text, self.drop_empty, self.cleaner = text, drop_empty, cleaner
        self.languages = (text.source, text.target)

    def __call__(self, block: streaming.Block) -> Done:
        """Its tokens.

        Raises:
            ValueError: a line is not UTF-8, or sacremoses is missing.
        """
        raw, carriage_returns = block.text()
        sides = [[self.text.tokenise(line, language) for line in side] for side, language in zip(raw, self.languages)]
        pairs: list[tuple[str, str]] = []
        dropped: Counter[str] = Counter()
        for pair in zip(*sides):
            kept = self._kept(*pair)
            if isinstance(kept, str):
                dropped[kept] += 1
            else:
                pairs.append(kept)
        written = ["".join(f"{line}\n" for line in side).encode() for side in zip(*pairs)] or [b"", b""]
        return Done(written, len(pairs), dropped, carriage_returns)

    def _kept(self, source: str, target: str) -> tuple[str, str] | str:
        if self.cleaner:
            return self.cleaner.cleaned(source, target)
        return EMPTY if self.drop_empty and not (source and target) else (source, target)

    def knowing(self, block: streaming.Block) -> Tokeniser:
        """This one, once the corpus's first block is known: cleaning depends on the first pair."""
        first = streaming.Block(block.paths, block.first, tuple(side[:1] for side in block.lines)).text()[0]
        source, target = (self.text.tokenise(side[0], name) for side, name in zip(first, self.languages))
        cleaner = self.cleaner and self.cleaner.knowing(source, target)
        return Tokeniser(self.text, self.drop_empty, cleaner)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text", type=Path, help="text.json")
    parser.add_argument("raw", help="prefix of the raw text: RAW.de, RAW.en")
    parser.add_argument("out", help="prefix to write to")
    parser.add_argument("--drop-empty", action="store_true", help="drop pairs with an empty side (training text only)")
    parser.add_argument("--no-normalise", action="store_true", help="leave punctuation alone, whatever text.json says")
    cleaning.add_options(parser)
    parser.add_argument("--workers", type=streaming.workers, default=streaming.cores())
    args = parser.parse_args()

    text = Text.read(args.text)
    if args.no_normalise:
        text = dataclasses.replace(text, normalise=False)
    tokeniser = Tokeniser(text, args.drop_empty, cleaning.cleaner(args))
    paths, outputs = ([f"{prefix}.{name}" for name in tokeniser.languages] for prefix in (args.raw, args.out))
    for block in streaming.blocks(*paths):
        tokeniser = tokeniser.knowing(block)
        break
    kept, carriage_returns = 0, [0, 0]
    dropped: Counter[str] = Counter()
    with writing(*outputs) as files:
        with bar.texts(f"tokenise {args.raw}", *paths) as shown:
            for done in streaming.parallel(tokeniser, streaming.blocks(*paths, shown=shown), args.workers):
                for file, side in zip(files, done.sides):
                    file.write(side)
                kept += done.kept
                dropped += done.dropped
                carriage_returns = [sum(both) for both in zip(carriage_returns, done.carriage_returns)]
        for path, lines in zip(paths, carriage_returns):
            streaming.warn_of_carriage_returns(path, lines)
        cleaning.report(args.raw, kept, dropped)


if __name__ == "__main__":
    run(main)
