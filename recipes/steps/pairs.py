"""One pass over texts that belong together line by line: lines changed, pairs cleaned, files written whole or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from recipes.steps import bar, cleaning, lengths, streaming
from recipes.steps.common import decoded, writing

Sides = list[list[str]]
"""Lines of either text."""


class Done(NamedTuple):
    """What became of a block.

    Attributes:
        sides: either side's lines, as they are written.
        kept: how many pairs these are.
        dropped: how many were dropped, by reason.
        long: lines that are too long for the model, if they were looked for.
    """

    sides: list[bytes]
    kept: int
    dropped: Counter[str]
    long: list[str]


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
    first: Sides = []
    for block in streaming.blocks(*paths):
        first = change([decoded(lines[:1], path) for lines, path in zip(block.lines, paths)])
        break
    rule = cleaning.rule(clean, [side[0] for side in first])

    def work(block: streaming.Block) -> Done:
        dropped: Counter[str] = Counter()
        kept: list[Sequence[str]] = []
        long = []
        for number, pair in enumerate(zip(*change(block.text())), block.first):
            outcome = rule(*pair) if rule else pair
            if isinstance(outcome, str):
                dropped[outcome] += 1
                continue
            kept.append(outcome)
            if too_long:
                long += [f"{path}: line {number}" for path, line in zip(paths, outcome) if lengths.is_long(line)]
        sides = ["".join(f"{line}\n" for line in side).encode() for side in zip(*kept)] or [b"" for _ in paths]
        return Done(sides, len(kept), dropped, long)

    name, total = " ".join(map(str, paths)), Done([], 0, Counter(), [])
    with writing(*outputs) as files:
        with bar.texts(f"read {name}", *paths) as shown:
            for done in streaming.parallel(work, streaming.blocks(*paths, shown=shown), streaming.cores()):
                for file, side in zip(files, done.sides):
                    file.write(side)
                total = Done([], total.kept + done.kept, total.dropped + done.dropped, total.long + done.long)
        lengths.settle(total.long, skip=too_long == "skip")
        cleaning.report(name, total.kept, total.dropped)
