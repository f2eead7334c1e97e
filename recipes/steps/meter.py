"""How far a long transfer is: a line every few seconds, over itself on a terminal."""

from __future__ import annotations

import sys
import time
from typing import TextIO

MB = 1e6


def size(count: float) -> str:
    """Bytes for people, in powers of 1000."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{int(count)} bytes"


class Meter:
    """Shows a transfer's progress on stderr.

    Args:
        name: of the file.
        every: seconds between two lines; on a terminal, a tenth of it.
    """

    def __init__(self, name: str, every: float, out: TextIO | None = None):
        self.name, self.out = name, out or sys.stderr
        self.over = self.out.isatty()
        self.every = every / 10 if self.over else every
        self.open_line = False
        self.begin(0, None)

    def begin(self, have: int, total: int | None) -> None:
        """A request begins: `have` bytes are here of `total`, if that is known."""
        self.have, self.total = have, total
        self.started = self.shown = time.monotonic()
        self.first = have

    def add(self, count: int) -> None:
        self.have += count
        now = time.monotonic()
        if now - self.shown >= self.every:
            self.shown = now
            self.show(now)

    def show(self, now: float) -> None:
        rate = (self.have - self.first) / max(now - self.started, 1e-9)
        text = f"{self.name}: {self.have / MB:.1f} MB, {rate / MB:.2f} MB/s"
        if self.total:
            left = int((self.total - self.have) / rate) if rate else 0
            text = (
                f"{self.name}: {self.have / MB:.1f} of {self.total / MB:.1f} MB ({100 * self.have // self.total} %), "
                f"{rate / MB:.2f} MB/s, {left // 60}:{left % 60:02d} left"
            )
        self.out.write(f"\r\x1b[K{text}" if self.over else f"{text}\n")
        self.out.flush()
        self.open_line = self.over

    def end(self) -> None:
        """Other lines may follow."""
        if self.open_line:
            self.out.write("\n")
            self.open_line = False
