"""Long texts, processed block by block on all cores. Lines stay in order, and memory does not grow with the text."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

from recipes.steps.bar import bar

BYTES = 1 << 18
"""Approximate size of a block of the first text."""
AHEAD = 4
"""Number of blocks per core that are read at a time."""
Block = tuple[int, list[list[bytes]]]
"""The number of the block's first line, from 1, and the lines of each text as they are in the files."""


def blocks(*paths: Path) -> Iterator[Block]:
    """The blocks of a text or of parallel texts, with a bar.

    Raises:
        ValueError: the texts differ in their number of lines.
    """
    with ExitStack() as opened:
        files = [opened.enter_context(path.open("rb")) for path in paths]
        shown = opened.enter_context(
            bar(f"read {' '.join(map(str, paths))}", sum(path.stat().st_size for path in paths))
        )
        first = 1
        while True:
            lines = [files[0].readlines(BYTES)]
            lines += [list(islice(file, len(lines[0]) or 1)) for file in files[1:]]
            if len(set(map(len, lines))) > 1:
                counts = [first - 1 + len(side) + sum(1 for _ in file) for side, file in zip(lines, files)]
                message = ", ".join(f"{path} has {count} lines" for path, count in zip(paths, counts))
                expected = (
                    "expected the same number, each line the other's translation. Fetch or align the files again."
                )
                raise ValueError(f"{message}; {expected}")
            if not lines[0]:
                return
            yield first, lines
            shown.update(sum(len(line) for side in lines for line in side))
            first += len(lines[0])


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parallel(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """The function's results, in the order of the items. Only a few items are in memory at a time.

    Workers are forks, so they share the memory of this process. They end with the recipe (`processes.supervise`).

    Args:
        function: called in worker processes. Its exceptions are raised here.

    Raises:
        ValueError: a worker was killed.
    """
    left = iter(items)
    try:
        with ProcessPoolExecutor(cores(), multiprocessing.get_context("fork"), FUNCTION.append, (function,)) as pool:
            while some := list(islice(left, AHEAD * cores())):
                yield from pool.map(_work, some)
    except BrokenProcessPool:
        message = "a worker process ended early; did it run out of memory?"
        raise ValueError(f"{message} Run again on fewer cores (taskset -c 0 make ...).") from None


FUNCTION: list[Callable[[Any], Any]] = []
"""In a worker: its function. A fork inherits the function, so it need not be picklable."""


def _work(item: Any) -> Any:
    return FUNCTION[-1](item)
