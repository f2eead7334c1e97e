"""Which pairs of tokenised sentences to train on: the same as Moses' clean-corpus-n.perl, pair for pair.

Read next to it: mosesdecoder, scripts/training/clean-corpus-n.perl.
"""

from __future__ import annotations

import argparse
import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

logger = logging.getLogger(__name__)

Rule = Callable[[str, str], tuple[str, str] | str]
"""From a pair to what is kept of it, or the reason to drop it, one of REASONS."""
LONGEST_WORD = 1000
"""Characters; the script's own bound."""
# The script's white space is Perl's: without U+001C to U+001F, which Python counts.
SPACE = re.compile(r"[^\S\x1c-\x1f]+")
TOO_LONG_A_WORD = re.compile(rf"(?:[^\s|]|[\x1c-\x1f]){{{LONGEST_WORD + 1}}}")
EMPTY = "with an empty side"
REASONS = (EMPTY, "too long", "too short", "of too different lengths", f"with a word over {LONGEST_WORD} characters")


@dataclass(frozen=True)
class Cleaner:
    """Moses' rule.

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

    def __call__(self, source: str, target: str) -> tuple[str, str] | str:
        """Keep the pair with single spaces, or say why not.

        Raises:
            ValueError: a word of a factored text lacks a factor.
        """
        sides = [line if self.factored else line.replace("|", "") for line in (source, target)]
        # The script removes one space at either end, and by then there is at most one.
        source, target = (SPACE.sub(" ", line).strip(" ") for line in sides)
        if not source or not target:
            return EMPTY
        words = source.count(" ") + 1, target.count(" ") + 1
        if max(words) > self.longest:
            return REASONS[1]
        if min(words) < self.shortest:
            return REASONS[2]
        if words[0] / words[1] > self.ratio or words[1] / words[0] > self.ratio:
            return REASONS[3]
        for side in (source, target):
            if len(side) > LONGEST_WORD and TOO_LONG_A_WORD.search(side):
                return REASONS[4]
        for side in (source, target):
            if "||" in side or " |" in side:
                raise ValueError(
                    f"{side!r} has an empty factor; since the first pair holds a |, each | separates factors. "
                    "Escape the text (the setting 'escape'), or fix the line."
                )
        return source, target


def drop_empty(source: str, target: str) -> tuple[str, str] | str:
    """Keep the pair as it is if both sides hold something."""
    return (source, target) if source and target else EMPTY


def rule(words: Sequence[str], first: Sequence[str]) -> Rule | None:
    """What CLEAN= or CLEAN_BPE= asks for: --drop-empty, or --lengths MIN MAX and --ratio R; None: nothing.

    Args:
        first: the corpus's first pair. The script takes its text for factored if this holds a "|".

    Raises:
        ValueError: the words are others, or contradict each other.
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--drop-empty", action="store_true")
    parser.add_argument("--lengths", type=int, nargs=2)
    parser.add_argument("--ratio", type=float)
    wrong = (
        f"CLEAN= or CLEAN_BPE= is {' '.join(words)}; expected --drop-empty, or --lengths MIN MAX and --ratio R, from 1."
    )
    try:
        args, unknown = parser.parse_known_args(words)
    except argparse.ArgumentError:
        raise ValueError(wrong) from None
    shortest, longest = args.lengths or (1, 1)
    ratio = 9.0 if args.ratio is None else args.ratio
    if unknown or not 0 < shortest <= longest or not ratio >= 1 or (args.ratio and not args.lengths):
        raise ValueError(wrong)
    if args.lengths:
        return Cleaner(shortest, longest, ratio, factored=any("|" in side for side in first))
    return drop_empty if args.drop_empty else None


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
