"""Long texts, block by block on all cores: the lines stay in order, and memory does not grow with the text."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from recipes.steps.common import decoded, reading

BYTES = 1 << 18
"""About how much of the first side makes a block."""


class Block(NamedTuple):
    """Some lines of a text, or of several that belong together line by line.

    Attributes:
        paths: the files.
        first: number of the first line, from 1.
        lines: each side's lines as they are in the file.
    """

    paths: tuple[str, ...]
    first: int
    lines: tuple[list[bytes], ...]

    def text(self) -> list[list[str]]:
        """Each side's lines, without their ends.

        Raises:
            ValueError: a line is not UTF-8.
        """
        return [decoded(lines, path, self.first) for path, lines in zip(self.paths, self.lines)]


def blocks(*paths: str | Path, shown: tqdm | None = None) -> Iterator[Block]:
    """The texts block by block.

    Args:
        shown: a bar that counts the bytes read.

    Raises:
        ValueError: a file is missing, or their numbers of lines differ.
    """
    names = tuple(map(str, paths))
    with ExitStack() as opened:
        files = [opened.enter_context(reading(path)) for path in paths]
        first = 1
        while True:
            lines = [files[0].readlines(BYTES)]
            lines += [list(islice(file, len(lines[0]) or 1)) for file in files[1:]]
            if len(set(map(len, lines))) > 1:
                counts = [first - 1 + len(side) + sum(1 for _ in file) for side, file in zip(lines, files)]
                said = ", ".join(f"{path} has {count} lines" for path, count in zip(names, counts))
                what = "expected the same number, each line the other's translation. Fetch or align the files again."
                raise ValueError(f"{said}; {what}")
            if not lines[0]:
                return
            yield Block(names, first, tuple(lines))
            if shown is not None:
                shown.update(sum(len(line) for side in lines for line in side))
            first += len(lines[0])


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parallel(function: Callable[[Any], Any], items: Iterable[Any], count: int) -> Iterator[Any]:
    """The function's results, in the order of the items, of which few are held at a time.

    The workers are forks: they share what was read before. They end with the recipe (`processes.supervise`).

    Args:
        function: computed in a worker process; what it raises is raised here.
        items: read when a worker is free.
        count: how many workers.

    Raises:
        ValueError: a worker was killed.
    """
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("fork"), FUNCTION.append, (function,))
    pending: deque[Future[Any]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(_work, item))
            if len(pending) > count:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        said = "a worker process ended early; did it run out of memory?"
        raise ValueError(f"{said} Run again on fewer cores (taskset -c 0 make ...).") from None
    finally:
        pool.shutdown(cancel_futures=True)


FUNCTION: list[Callable[[Any], Any]] = []
"""In a worker: what it computes, which a fork need not have by name."""


def _work(item: Any) -> Any:
    return FUNCTION[-1](item)
