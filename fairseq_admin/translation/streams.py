"""Text as it flows through `fairseq-admin translate`: read some lines at a time, written in order, shown on a bar."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from ..errors import AdminError
from .engines import Search
from .pipeline import Pipeline, Translation

CHUNK = 2000
"""Lines read at a time, of anything but a terminal."""


def read(stream: BinaryIO, name: str, size: int) -> Iterator[list[str]]:
    """Lines of UTF-8, `size` at a time, without the newlines, which alone end a line.

    Raises:
        AdminError: a line is not UTF-8.
    """
    numbered = enumerate(iter(stream.readline, b""), 1)
    while chunk := list(itertools.islice(numbered, size)):
        lines = []
        for number, line in chunk:
            try:
                lines.append(line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\n"))
            except UnicodeDecodeError as error:
                raise AdminError(
                    f"{name}: line {number} is not UTF-8 (byte 0x{line[error.start]:02x} at column {error.start + 1}). "
                    "Convert the text first, as with iconv -f latin1 -t utf-8."
                ) from None
        yield lines


@contextlib.contextmanager
def opened(path: Path | None) -> Iterator[tuple[BinaryIO, str]]:
    """A file to read, or standard input, and what to call it.

    Raises:
        AdminError: the file cannot be read.
    """
    if path is None or str(path) == "-":
        yield sys.stdin.buffer, "standard input"
        return
    try:
        stream = path.open("rb")
    except OSError as error:
        raise AdminError(f"{path}: {error.strerror}; expected a text, a sentence a line.") from None
    with stream:
        yield stream, str(path)


@contextlib.contextmanager
def written(path: Path | None) -> Iterator[BinaryIO]:
    """A file that is there when all is written, or standard output; whoever closes that has read enough.

    Raises:
        AdminError: the path is no place for a file, or the disk is full.
    """
    if path and path.exists() and not path.is_file():
        raise AdminError(f"{path} is a folder or a device; a file to write was expected.")
    part = path.with_name(f"{path.name}.{os.getpid()}.part") if path else None
    try:
        if path and part:
            with part.open("wb") as stream:
                yield stream
            os.replace(part, path)
        else:
            yield sys.stdout.buffer
    except OSError as error:
        if not path:
            # Python will flush what is left at the end, and would fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError):
                return
        where = path or "standard output"
        raise AdminError(f"{where}: could not be written ({error}). Is the disk full, or the folder missing?") from None
    finally:
        if part:
            with contextlib.suppress(OSError):
                part.unlink()


def formatted(number: int, translations: Iterable[Translation], search: Search) -> str:
    """What is written of a line: its translation, or a line each: number, score and text, with tabs between."""
    if search.nbest == 1:
        return "".join(f"{translation.text}\n" for translation in translations)
    return "".join(f"{number}\t{score:.4f}\t{text}\n" for score, text in translations)


def flow(pipeline: Pipeline, source: BinaryIO, name: str, sink: BinaryIO, search: Search, batch_tokens: int) -> None:
    """Translate all of a text, a terminal's line by line, with a bar where a terminal shows it.

    Raises:
        AdminError: a line is not UTF-8.
    """
    terminal = source.isatty()
    first = 1
    with tqdm(unit=" lines", file=sys.stderr, disable=True if terminal else None) as bar:
        for lines in read(source, name, 1 if terminal else CHUNK):
            found = pipeline.translate(
                lines,
                search,
                batch_tokens,
                first,
                warn=lambda message: tqdm.write(f"fairseq-admin: {message}", file=sys.stderr),
                done=bar.update,
            )
            for number, translations in enumerate(found, first):
                sink.write(formatted(number, translations, search).encode("utf-8"))
            sink.flush()
            first += len(lines)
