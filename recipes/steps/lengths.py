"""Lines that are too long for the model: fairseq ends over one, for a test set only after all training.

A model with P positions reads P - 1 units a line, since the end of the sentence takes one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from recipes.steps.common import read_lines

logger = logging.getLogger(__name__)

POSITIONS = 1024
"""fairseq's default, --max-source-positions and --max-target-positions."""
LONGEST = POSITIONS - 1


class Long(NamedTuple):
    """A line of a file, and of how many units it is."""

    path: str
    number: int
    units: int


def too_long(path: str, lines: Iterable[tuple[int, str]]) -> list[Long]:
    """Those of more than LONGEST units among the numbered lines of a file."""
    counted = ((number, line.count(" ") + 1) for number, line in lines)
    return [Long(path, number, units) for number, units in counted if units > LONGEST]


def settle(found: list[Long], skip: bool) -> None:
    """Say how many lines are too long and that they are skipped.

    Raises:
        ValueError: they are not to be.
    """
    if not found:
        return
    first = found[0]
    which = f"{first.path}: line {first.number} is of {first.units} units, and the model reads {LONGEST}"
    more = f" ({len(found)} such lines in all)" if len(found) > 1 else ""
    if not skip:
        raise ValueError(
            f"{which}{more}. Split it in the raw text, and its translation with it, or give TOO_LONG=skip, "
            "which counts it as not translated."
        )
    logger.info("%s%s; skipped: no loss is computed of it, and its translation is empty.", which, more)


def skipped(prefix: str, languages: Iterable[str]) -> set[int]:
    """Numbers, from 0, of the pairs that fairseq skips, for one of the sides in units, PREFIX.de or PREFIX.en."""
    paths = [Path(f"{prefix}.{language}") for language in languages]
    return {long.number for path in paths for long in too_long(str(path), enumerate(read_lines(path)))}
