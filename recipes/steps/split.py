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
    before = kept = 0
    texts = [[f"{part}.{language}" for language in languages] for part in parts]
    with writing(*(f"{out}.{language}" for language in languages)) as files:
        with bar.texts(f"split {out}", *chain(*texts)) as shown:
            for block in chain.from_iterable(blocks(*paths, shown=shown) for paths in texts):
                count = len(block.lines[0])
                chosen = [
                    index for index in range(count)
                    if keep is None or ((before + index + 1) % every == 0) == (keep == "nth")
                ]  # fmt: skip
                for file, lines in zip(files, block.lines):
                    # The last line of a file may lack its newline.
                    file.writelines(lines[index].rstrip(b"\n") + b"\n" for index in chosen)
                before += count
                kept += len(chosen)
        if not kept:
            raise ValueError(f"{out}: none of {before} pairs is kept; expected some. Check the texts and VALID_EVERY=.")
        logger.info("%s: %d of %d pairs", out, kept, before)
