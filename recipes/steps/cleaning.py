"""Which pairs of tokenised sentences to train on: the same as Moses' clean-corpus-n.perl, pair for pair.

Read next to it: mosesdecoder, scripts/training/clean-corpus-n.perl.
"""

from __future__ import annotations

import argparse
import logging
import re
from collections import Counter
from dataclasses import dataclass, replace

logger = logging.getLogger(__name__)

LONGEST_WORD = 1000
"""Characters; the script's own bound."""
# The script's white space is Perl's: without U+001C to U+001F, which Python counts.
SPACE = re.compile(r"[^\S\x1c-\x1f]+")
TOO_LONG_A_WORD = re.compile(rf"(?:[^\s|]|[\x1c-\x1f]){{{LONGEST_WORD + 1}}}")
EMPTY = "with an empty side"
REASONS = (EMPTY, "too long", "too short", "of too different lengths", f"with a word over {LONGEST_WORD} characters")


@dataclass(frozen=True)
class Cleaner:
    """What a pair must be to be kept.

    Attributes:
        shortest: words a side, at least.
        longest: words a side, at most.
        ratio: one side's words over the other's, at most.
        factored: "|" separates a word's factors, and stays; otherwise it is removed from the text.
    """

    shortest: int
    longest: int
    ratio: float = 9.0
    factored: bool = False

    def knowing(self, source: str, target: str) -> Cleaner:
        """With `factored` set as the script sets it: by whether the corpus's first pair holds a "|"."""
        return replace(self, factored="|" in source or "|" in target)

    def cleaned(self, source: str, target: str) -> tuple[str, str] | str:
        """The pair with single spaces, or the reason to drop it, one of REASONS.

        Raises:
            ValueError: a word of a factored text lacks a factor.
        """
        source, target = self._squeezed(source), self._squeezed(target)
        if not source or not target:
            return EMPTY
        words = source.count(" ") + 1, target.count(" ") + 1
        if max(words) > self.longest:
            return REASONS[1]
        if min(words) < self.shortest:
            return REASONS[2]
        if words[0] / words[1] > self.ratio or words[1] / words[0] > self.ratio:
            return REASONS[3]
        if _has_too_long_a_word(source) or _has_too_long_a_word(target):
            return REASONS[4]
        for side in (source, target):
            if "||" in side or " |" in side:
                raise ValueError(
                    f"{side!r} has an empty factor; since the first pair holds a |, each | separates factors. "
                    "Escape the text (the setting 'escape'), or fix the line."
                )
        return source, target

    def _squeezed(self, line: str) -> str:
        line = line if self.factored else line.replace("|", "")
        # The script removes one space at either end, and by then there is at most one.
        return SPACE.sub(" ", line).strip(" ")


def _has_too_long_a_word(line: str) -> bool:
    return len(line) > LONGEST_WORD and bool(TOO_LONG_A_WORD.search(line))


def add_options(parser: argparse.ArgumentParser) -> None:
    """--lengths and --ratio."""
    parser.add_argument("--lengths", type=int, nargs=2, metavar=("MIN", "MAX"), help="keep pairs with as many words")
    parser.add_argument(
        "--ratio", type=float, help="keep pairs whose lengths differ by no larger a factor (default: 9)"
    )


def cleaner(args: argparse.Namespace) -> Cleaner | None:
    """What the options ask for; None: nothing.

    Raises:
        ValueError: they contradict each other.
    """
    if args.lengths is None:
        if args.ratio is not None:
            raise ValueError("--ratio goes with --lengths MIN MAX; expected both or neither.")
        return None
    shortest, longest = args.lengths
    if not 0 < shortest <= longest:
        raise ValueError(f"--lengths {shortest} {longest}; expected MIN and MAX, 1 or more, MIN the smaller.")
    ratio = 9.0 if args.ratio is None else args.ratio
    if not ratio >= 1:
        raise ValueError(f"--ratio {ratio:g}; expected 1 or more.")
    return Cleaner(shortest, longest, ratio)


def report(name: str, kept: int, dropped: Counter[str]) -> None:
    """Say how many pairs were dropped and why.

    Raises:
        ValueError: no pair is left.
    """
    reasons = ", ".join(f"{dropped[reason]} {reason}" for reason in REASONS if dropped[reason])
    if not kept:
        raise ValueError(
            f"{name}: no pair is left{f' of {sum(dropped.values())}: {reasons}' if reasons else ', it is empty'}; "
            "expected sentences on both sides. Check the files and the bounds."
        )
    logger.info("%s: kept %d pairs, dropped %d%s", name, kept, sum(dropped.values()), reasons and f": {reasons}")
