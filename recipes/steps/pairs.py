"""One pass over texts that belong together line by line: lines changed, pairs cleaned, files written whole or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from recipes.steps import bar, cleaning, lengths, streaming
from recipes.steps.common import decoded, writing

Sides = list[list[str]]
"""Lines of either text."""


def convert(
    change: Callable[[Sides], Sides], paths: Sequence[Path], outputs: Sequence[Path], clean: Sequence[str] = (),
    too_long: str = "",
) -> None:  # fmt: skip
    """Change the texts on all cores, and drop pairs.

    Args:
        change: a block of either side's lines, into as many.
        clean: the options of CLEAN=.
        too_long: refuse or skip lines that are too long for the model, if they are to be looked for.

    Raises:
        ValueError: a text is missing or not UTF-8, they have not as many lines each, nothing is left of them, or a line
            is too long for the model and not to be skipped.
    """
    rule = cleaning.rule(clean)

    def work(block: streaming.Block) -> tuple[list[bytes], Counter[str], list[str]]:
        """Either side as it is written; how many pairs were dropped, by reason; lines that are too long."""
        first, sides = block
        pairs = list(zip(*change([decoded(lines, path, first) for lines, path in zip(sides, paths)])))
        reasons = [rule(*pair) for pair in pairs]
        kept = [(number, pair) for number, (pair, reason) in enumerate(zip(pairs, reasons), first) if not reason]
        long = [
            f"{path}: line {number}"
            for number, pair in (kept if too_long else ())
            for path, line in zip(paths, pair)
            if lengths.is_long(line)
        ]
        written = ["".join(f"{pair[side]}\n" for _, pair in kept).encode() for side in range(len(paths))]
        return written, Counter(reasons), long

    name, counts, long = " ".join(map(str, paths)), Counter[str](), []
    with writing(*outputs) as files:
        with bar.texts(f"read {name}", *paths) as shown:
            for sides, reasons, found in streaming.parallel(work, streaming.blocks(*paths, shown=shown)):
                for file, side in zip(files, sides):
                    file.write(side)
                counts += reasons
                long += found
        lengths.settle(long, skip=too_long == "skip")
        cleaning.report(name, counts)
