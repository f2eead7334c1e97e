"""Join parallel texts into one; or keep every Nth pair of it to validate on, or the rest to train on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from recipes.steps import bar
from recipes.steps.common import writing
from recipes.steps.streaming import blocks

logger = logging.getLogger(__name__)


def split(parts: Sequence[Path], languages: Sequence[str], out: Path, every: int = 1, keep: str | None = None) -> None:
    """Write OUT.de and OUT.en.

    Args:
        parts: prefixes of parallel texts, in order.
        keep: of all their pairs, every Nth (`nth`), the others (`rest`), or all.

    Raises:
        ValueError: no pair is kept.
    """
    number = kept = 0
    texts = [[f"{part}.{language}" for language in languages] for part in parts]
    with writing(*(f"{out}.{language}" for language in languages)) as files:
        with bar.texts(f"split {out}", *chain(*texts)) as shown:
            pairs = (pair for paths in texts for _, sides in blocks(*paths, shown=shown) for pair in zip(*sides))
            for number, pair in enumerate(pairs, 1):
                if keep is None or (number % every == 0) == (keep == "nth"):
                    kept += 1
                    for file, line in zip(files, pair):
                        file.write(line)
        if not kept:
            raise ValueError(f"{out}: none of {number} pairs is kept; expected some. Check the texts and VALID_EVERY=.")
        logger.info("%s: %d of %d pairs", out, kept, number)
