"""Selection of the pairs to train on, by the rules of Moses' clean-corpus-n.perl.

Source: mosesdecoder, scripts/training/clean-corpus-n.perl. Its treatment of white space and of | is left out: words
have single spaces between them, and the tokeniser escapes | (the setting `escape`).
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

Rule = Callable[..., str]
"""Maps the sides of a pair to one of REASONS to drop the pair, or to an empty text."""
LONGEST_WORD = 1000
"""Characters; the script has the same bound."""
EMPTY = "with an empty side"
REASONS = (EMPTY, "too long", "too short", "of too different lengths", f"with a word over {LONGEST_WORD} characters")


def drop_empty(*sides: str) -> str:
    return "" if all(sides) else EMPTY


def by_length(shortest: int, longest: int, ratio: float) -> Rule:
    """Moses' rule.

    Args:
        shortest: smallest number of words on a side.
        longest: largest number of words on a side.
        ratio: largest ratio of the two numbers of words.
    """

    def reason(*sides: str) -> str:
        words = sorted(side.count(" ") + 1 for side in sides)
        long_words = (len(side) > LONGEST_WORD and max(map(len, side.split(" "))) > LONGEST_WORD for side in sides)
        if not all(sides):
            return EMPTY
        if words[-1] > longest:
            return REASONS[1]
        if words[0] < shortest:
            return REASONS[2]
        if words[-1] / words[0] > ratio:
            return REASONS[3]
        return REASONS[4] if any(long_words) else ""

    return reason


def rule(words: Sequence[str]) -> Rule:
    """The rule of --clean or --clean-bpe: drop-empty, or lengths MIN MAX and ratio R, or nothing.

    Raises:
        ValueError: the words are not such a rule, or MIN is above MAX.
    """
    option = " ".join(words)
    match = re.fullmatch(r"|drop-empty|lengths ([1-9]\d*) (\d+)(?: ratio ([1-9]\d*(?:\.\d+)?))?", option)
    if not match or (match[1] and int(match[1]) > int(match[2])):
        raise ValueError(
            f"--clean or --clean-bpe is {option}; expected drop-empty, or lengths MIN MAX and ratio R, from 1."
        )
    if match[1]:
        return by_length(int(match[1]), int(match[2]), float(match[3] or 9))
    return drop_empty if option else lambda *sides: ""


def report(name: str, counts: Counter[str]) -> None:
    """Log how many pairs were kept and dropped, with the reasons.

    Args:
        counts: number of pairs by reason; kept pairs have an empty reason.

    Raises:
        ValueError: no pair is left.
    """
    kept = counts.pop("", 0)
    reasons = ", ".join(f"{counts[reason]} {reason}" for reason in REASONS if counts[reason])
    if not kept:
        raise ValueError(
            f"{name}: no pair is left{f' of {counts.total()}: {reasons}' if reasons else ', it is empty'}; "
            "expected sentences on both sides. Check the files and the bounds."
        )
    logger.info("%s: kept %d pairs, dropped %d%s", name, kept, counts.total(), reasons and f": {reasons}")
