"""Lines that are too long for the model: fairseq ends over one, for a test set only after all training.

A model with P positions reads P - 1 units a line, since the end of the sentence takes one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from recipes.steps.common import read_lines

logger = logging.getLogger(__name__)

LONGEST = 1024 - 1
"""Units. 1,024 is fairseq's default, --max-source-positions and --max-target-positions."""


def is_long(line: str) -> bool:
    return line.count(" ") >= LONGEST


def settle(long: list[str], skip: bool) -> None:
    """Say how many lines are too long and that they are skipped.

    Args:
        long: each one's file and number.

    Raises:
        ValueError: they are not to be skipped.
    """
    if not long:
        return
    found = f"{long[0]} is of more than {LONGEST} units, which is what the model reads"
    found += f" ({len(long)} such lines in all)" if len(long) > 1 else ""
    if not skip:
        raise ValueError(
            f"{found}. Split it in the raw text, and its translation with it, or give TOO_LONG=skip, which counts it "
            "as not translated."
        )
    logger.info("%s; skipped: no loss is computed of it, and its translation is empty.", found)


def skipped(prefix: str, languages: Iterable[str]) -> set[int]:
    """Numbers, from 0, of the pairs that fairseq skips, for one of the sides in units, PREFIX.de or PREFIX.en."""
    sides = (read_lines(f"{prefix}.{language}") for language in languages)
    return {number for lines in sides for number, line in enumerate(lines) if is_long(line)}
