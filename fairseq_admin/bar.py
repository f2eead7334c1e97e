"""Show the progress of a long step on standard error: count, total, rate, time left. A short step shows nothing.

On a terminal it is tqdm's bar; elsewhere, as in a log, one line every ten seconds. The recipes use this file too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")
SECONDS = 10.0
"""Time between two lines of a log. On a terminal the bar is drawn ten times as often."""
LINE = "{desc}: {n_fmt} of {total_fmt}{unit} ({percentage:.0f} %), {rate_fmt}, {remaining} left"
LINE_WITHOUT_TOTAL = "{desc}: {n_fmt}{unit}, {rate_fmt}"


class Bar(tqdm):
    """tqdm without its monitor thread, since some steps fork."""

    monitor_interval = 0


class Lines:
    """A stream for tqdm that puts each state on its own line instead of over the last one."""

    def write(self, text: str) -> None:
        if text.strip():
            # tqdm pads a rate below ten with a space.
            sys.stderr.write(f"{text.strip().replace(',  ', ', ')}\n")

    def flush(self) -> None:
        sys.stderr.flush()


def bar(
    title: str, total: int | None, unit: str, scaled: bool = False, hidden: bool = False, done: int = 0,
    prefix: str = "fairseq-admin: ",
) -> tqdm:  # fmt: skip
    """Make a bar.

    Args:
        title: the name of the step.
        total: number of units, if it is known.
        unit: the unit, with a space before it if it is a word.
        scaled: show large numbers as 1.2G.
        hidden: show nothing.
        done: number of units that an earlier run did.
        prefix: prefix of the title.

    Returns:
        A context manager with `update`.
    """
    look: dict[str, Any] = {"file": sys.stderr, "mininterval": SECONDS / 10, "dynamic_ncols": True}
    if not sys.stderr.isatty():
        look = {"file": Lines(), "mininterval": SECONDS, "bar_format": LINE if total else LINE_WITHOUT_TOTAL}
    return Bar(
        desc=f"{prefix}{title}", total=total, initial=done, unit=unit, unit_scale=scaled, leave=False, miniters=1,
        delay=look["mininterval"], disable=hidden, **look,
    )  # fmt: skip


def progress(title: str, items: Sequence[T], unit: str) -> Iterator[T]:
    """Go through items with a bar.

    Args:
        title: the name of the step.
        items: the items, in a sequence of known length.
        unit: the unit, with a space before it.

    Yields:
        The items.
    """
    with bar(title, len(items), unit) as shown:
        for item in items:
            yield item
            shown.update()
