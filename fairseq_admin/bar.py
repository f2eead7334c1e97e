"""How far a long step is: n of N, the rate, and the time left at the recent one; a step of a few seconds shows nothing.

On a terminal it is tqdm's bar; elsewhere, as in a log, a line every ten seconds. Both on standard error. The recipes
use this file too, by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")
SECONDS = 10.0
"""Between two lines of a log. On a terminal, a tenth of it."""
LINE = "{desc}: {n_fmt} of {total_fmt}{unit} ({percentage:.0f} %), {rate_fmt}, {remaining} left"
LINE_WITHOUT_TOTAL = "{desc}: {n_fmt}{unit}, {rate_fmt}"


class Bar(tqdm):
    """tqdm without its watching thread: some steps fork."""

    monitor_interval = 0


class Lines:
    """A log to tqdm: each state on a line of its own, instead of over the one before."""

    def write(self, text: str) -> None:
        if text.strip():
            # tqdm fills a rate below ten up with a space.
            sys.stderr.write(f"{text.strip().replace(',  ', ', ')}\n")

    def flush(self) -> None:
        sys.stderr.flush()


def bar(
    title: str, total: int | None, unit: str, scaled: bool = False, hidden: bool = False, done: int = 0,
    speaker: str = "fairseq-admin: ",
) -> tqdm:  # fmt: skip
    """A bar; enter it and `update` it.

    Args:
        title: what is being done.
        total: how many units in all, if that is known.
        unit: what is counted, with a space before it if it is a word.
        scaled: numbers are large, and shown as 1.2G.
        hidden: nothing is shown.
        done: how many units an earlier run did.
        speaker: what the title begins with.
    """
    look: dict[str, Any] = {"file": sys.stderr, "mininterval": SECONDS / 10, "dynamic_ncols": True}
    if not sys.stderr.isatty():
        look = {"file": Lines(), "mininterval": SECONDS, "bar_format": LINE if total else LINE_WITHOUT_TOTAL}
    return Bar(
        desc=f"{speaker}{title}", total=total, initial=done, unit=unit, unit_scale=scaled, leave=False, miniters=1,
        delay=look["mininterval"], disable=hidden, **look,
    )  # fmt: skip


def each(title: str, items: Sequence[T], unit: str) -> Iterator[T]:
    """The items one after the other, with a bar."""
    with bar(title, len(items), unit) as shown:
        for item in items:
            yield item
            shown.update()
