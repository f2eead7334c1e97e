"""Progress of a step: the plugin's bar (fairseq_admin/bar.py), which counts bytes here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from fairseq_admin import bar as plain

BLOCK = 1 << 18


@contextmanager
def bar(title: str, total: int | None, done: int = 0) -> Iterator[tqdm]:
    """A bar that counts bytes; call its `update`. Log messages inside the block do not break the bar.

    Args:
        title: shown before the bar.
        total: bytes in all, if known.
        done: bytes that an earlier run finished.
    """
    opened = plain.bar(title, total, "B", scaled=True, done=done, prefix="")
    with logging_redirect_tqdm(tqdm_class=type(opened)), opened as shown:
        yield shown


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
    """Open a file for reading, with a bar that shows how much was read."""
    with bar(title, Path(path).stat().st_size) as shown, BufferedReader(_Counted(path, shown), BLOCK) as file:
        yield file
