"""Text as it flows through `fairseq-admin translate`: read some lines at a time, written in order, shown on a bar."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from ..bar import bar
from ..checkpoints.files import replacing
from ..ending import standard_output
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
        if sys.stdin is None:
            raise AdminError("standard input is closed; a text was expected there. Give a file.")
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
    if path is None:
        if sys.stdout is None:
            raise AdminError("standard output is closed, where the translation goes. Give --output.")
        with standard_output():
            yield sys.stdout.buffer
        return
    try:
        with replacing(path) as part, part.open("wb") as stream:
            yield stream
    except OSError as error:
        raise AdminError(f"{path}: could not be written ({error}). Is the disk full, or the folder missing?") from None


def formatted(number: int, translations: Iterable[Translation], search: Search) -> str:
    """What is written of a line: its translation, or a line each: number, score and text, with tabs between."""
    if search.nbest == 1:
        return "".join(f"{translation.text}\n" for translation in translations)
    return "".join(f"{number}\t{score:.4f}\t{text}\n" for score, text in translations)


def lines_of(source: BinaryIO) -> int | None:
    """How many lines a file has from where it is; None: that cannot be told without reading it away."""
    try:
        start = source.tell()
        if not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
            return None
        count = sum(block.count(b"\n") for block in iter(lambda: source.read(1 << 20), b""))
        source.seek(start)
    except OSError:  # of a pipe, or of what is no file
        return None
    return count


def prompted(lines: Iterator[list[str]]) -> Iterator[list[str]]:
    """The lines that somebody types, each asked for on standard error."""
    print("fairseq-admin: type a sentence a line; Ctrl-D ends.", file=sys.stderr)
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        chunk = next(lines, None)
        if chunk is None:
            print(file=sys.stderr)
            return
        yield chunk


def flow(pipeline: Pipeline, source: BinaryIO, name: str, sink: BinaryIO, search: Search, batch_tokens: int) -> None:
    """Translate all of a text: a terminal's line by line after a prompt, any other with a bar.

    Raises:
        AdminError: a line is not UTF-8.
    """
    if source.isatty():
        chunks, shown = prompted(read(source, name, 1)), bar("translate", 0, " lines", hidden=True)
    else:
        chunks, shown = read(source, name, CHUNK), bar("translate", lines_of(source), " lines")
    first = 1
    with shown:
        for lines in chunks:
            found = pipeline.translate(
                lines,
                search,
                batch_tokens,
                first,
                warn=lambda message: tqdm.write(f"fairseq-admin: {message}", file=sys.stderr),
                done=shown.update,
            )
            shown.clear()  # or the first line would stick to it where both are on a terminal
            for number, translations in enumerate(found, first):
                sink.write(formatted(number, translations, search).encode("utf-8"))
            sink.flush()
            first += len(lines)
