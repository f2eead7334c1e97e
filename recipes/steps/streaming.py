"""Long texts, block by block on all cores: the lines stay in order, and memory does not grow with the text."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

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
                raise ValueError(_unequal(names, [first - 1 + len(side) for side in lines], files))
            if not lines[0]:
                return
            yield Block(names, first, tuple(lines))
            if shown is not None:
                shown.update(sum(len(line) for side in lines for line in side))
            first += len(lines[0])


def _unequal(paths: Sequence[str], counts: list[int], files: list[BinaryIO]) -> str:
    counts = [count + sum(1 for _ in file) for count, file in zip(counts, files)]
    return (
        f"{', '.join(f'{path} has {count} lines' for path, count in zip(paths, counts))}; expected the same "
        "number, each line the other's translation. Fetch or align the files again."
    )


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parallel(function: Callable[[Any], Any], items: Iterable[Any], count: int) -> Iterator[Any]:
    """The function's results, in the order of the items. Each worker holds at most one item, so memory is bounded.

    The workers are forks: they share what was read before. They end when this process does, however it ends, because
    each waits for its next item on a pipe that nobody else holds.

    Args:
        function: computed in a worker process; its ValueErrors are raised here.
        items: read when a worker is free.
        count: how many workers.

    Raises:
        ValueError: the function's, or a worker was killed.
    """
    context = multiprocessing.get_context("fork")
    ends: list[Connection] = []
    processes = []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            ends.append(ours)
            processes.append(context.Process(target=_work, args=(function, theirs, tuple(ends)), daemon=True))
            processes[-1].start()
            theirs.close()
        idle: deque[Any] = deque(ends)
        busy: deque[Any] = deque()
        for item in items:
            result = None
            if waited := not idle:
                idle.append(busy.popleft())
                result = _received(idle[0])
            busy.append(idle.popleft())
            _send(busy[-1], item)
            if waited:
                yield result
        while busy:
            yield _received(busy.popleft())
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        for end in ends:
            end.close()


def _send(end: Connection, item: Any) -> None:
    try:
        end.send(item)
    except BrokenPipeError:
        raise ValueError(KILLED) from None


def _received(end: Connection) -> Any:
    try:
        good, result = end.recv()
    except (EOFError, ConnectionResetError):
        raise ValueError(KILLED) from None
    if not good:
        raise ValueError(result)
    return result


KILLED = "a worker process ended early; did it run out of memory? Run again on fewer cores (taskset -c 0 make ...)."


def _work(function: Callable[[Any], Any], end: Connection, others: Iterable[Connection]) -> None:
    """A worker's life. `others` are the parent's ends, inherited; left open here, they would outlive the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for other in others:
        other.close()
    while True:
        try:
            item = end.recv()
        except EOFError:
            return
        try:
            result = True, function(item)
        except ValueError as error:
            result = False, str(error)
        try:
            end.send(result)
        except (BrokenPipeError, ConnectionResetError):
            return
