"""How far a long step is: n of N, the rate, and the time left at the recent rate; one bar for all steps.

On a terminal it is tqdm's bar. Elsewhere, as in a log, it is a line every ten seconds. A step of a few seconds shows
nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

BLOCK = 1 << 18
SECONDS = 10.0
"""Between two lines of a log. On a terminal, a tenth of it."""
LINE = "{desc}: {n_fmt}{unit} of {total_fmt}{unit} ({percentage:.0f} %), {rate_fmt}, {remaining} left"
LINE_WITHOUT_TOTAL = "{desc}: {n_fmt}{unit}, {rate_fmt}"


class Bar(tqdm):
    """tqdm without its watching thread: the steps fork."""

    monitor_interval = 0


class Lines:
    """A log to tqdm: each state on a line of its own, instead of over the one before."""

    def write(self, text: str) -> None:
        if text.strip():
            sys.stderr.write(f"{text.strip()}\n")

    def flush(self) -> None:
        sys.stderr.flush()


@contextmanager
def bar(title: str, total: int | None, done: int = 0, unit: str = "B") -> Iterator[tqdm]:
    """A bar that counts bytes, or what `unit` names; `update` it. Log messages of the block do not break it.

    Args:
        title: what is done to what.
        total: bytes in all, if they are known.
        done: bytes that an earlier run did.
    """
    look: dict[str, Any] = {"file": sys.stderr, "mininterval": SECONDS / 10, "dynamic_ncols": True}
    if not sys.stderr.isatty():
        look = {"file": Lines(), "mininterval": SECONDS, "bar_format": LINE if total else LINE_WITHOUT_TOTAL}
    shown = Bar(
        desc=title, total=total, initial=done, unit=unit, unit_scale=True, leave=False, miniters=1,
        delay=look["mininterval"], **look,
    )  # fmt: skip
    with logging_redirect_tqdm(tqdm_class=Bar), shown:
        yield shown


def texts(title: str, *paths: str | Path) -> Any:
    """A bar for reading whole files; whoever opens them says so if one is missing."""
    return bar(title, sum(path.stat().st_size for path in map(Path, paths) if path.is_file()))


class _Counted(FileIO):
    def __init__(self, path: str | Path, shown: tqdm) -> None:
        super().__init__(path)
        self.shown = shown

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        self.shown.update(count)
        return count


@contextmanager
def reading(title: str, path: str | Path) -> Iterator[BinaryIO]:
    """The file, opened; a bar shows how much of it was read."""
    with texts(title, path) as shown, BufferedReader(_Counted(path, shown), BLOCK) as file:
        yield file
