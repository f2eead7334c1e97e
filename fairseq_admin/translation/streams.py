"""The text of `fairseq-admin translate`: read in chunks of lines, written in order, with a progress bar."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from .. import outputs
from ..bar import bar
from ..errors import AdminError, line
from ..text.tokens import removal_note
from .engines import Hypothesis, Search
from .pipeline import Pipeline

CHUNK = 2000
"""Lines read at a time; from a terminal, one."""


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    """A block that reads a text.

    Raises:
        AdminError: the disk fails, or the gzip file is damaged.
    """
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise AdminError(f"{name}: cannot be read ({line(error)}). Copy it again.") from None


def read_lines(stream: BinaryIO, name: str, size: int) -> Iterator[list[str]]:
    """Read lines of UTF-8. Only a newline ends a line.

    Args:
        stream: the text.
        name: the name of the text, for messages.
        size: number of lines to read at a time.

    Yields:
        Lines without their newlines.

    Raises:
        AdminError: a line is not UTF-8, or the text cannot be read.
    """
    numbered = enumerate(iter(stream.readline, b""), 1)
    with _reading(name):
        while lines := [_decoded(raw, number, name) for number, raw in itertools.islice(numbered, size)]:
            yield lines


def _decoded(raw: bytes, number: int, name: str) -> str:
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\n")
    except UnicodeDecodeError as error:
        raise AdminError(
            f"{name}: line {number} is not UTF-8 (byte 0x{raw[error.start]:02x} at column {error.start + 1}). "
            "Convert the text first, as with iconv -f latin1 -t utf-8."
        ) from None


@contextlib.contextmanager
def opened(path: Path | None) -> Iterator[tuple[BinaryIO, str]]:
    """A block that reads a file, decompressed if its name ends in .gz, or standard input.

    Args:
        path: the file. None or "-": standard input.

    Yields:
        The stream, and its name for messages.
    """
    if path is None or str(path) == "-":
        yield sys.stdin.buffer, "standard input"
        return
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
        yield stream, str(path)  # type: ignore[misc]


@contextlib.contextmanager
def written(path: Path | None) -> Iterator[Callable[[bytes], None]]:
    """A block that writes to standard output or to a file. The file appears under its name when the block ends.

    Args:
        path: the file. None: standard output.

    Yields:
        A function that writes bytes.

    Raises:
        AdminError: the path cannot be written, or the disk is full.
        StdoutClosed: the reader of standard output has closed it.
    """
    if path is None:
        stdout = sys.stdout  # sys.stdout may be redirected while the block runs

        def show(text: bytes) -> None:
            with outputs.standard_output(stdout):
                stdout.buffer.write(text)

        yield show
        return
    with outputs.replacing(path) as part:

        def write(text: bytes) -> None:
            # Close the file after each write: a network disk may refuse a write only when the file is closed.
            with outputs.writing(path), part.open("ab") as stream:
                stream.write(text)

        write(b"")
        yield write


def formatted(number: int, translations: Iterable[Hypothesis], search: Search) -> str:
    """Format the translations of a line: the text alone, or number, score and text with tabs, one line each."""
    if search.nbest == 1:
        return "".join(f"{translation.text}\n" for translation in translations)
    return "".join(f"{number}\t{score:.4f}\t{text}\n" for score, text in translations)


def lines_of(source: BinaryIO, name: str) -> int | None:
    """Count the lines of a file after the current position; None if it is a pipe, which can be read only once.

    Raises:
        AdminError: the text cannot be read.
    """
    if not source.seekable():
        return None
    with _reading(name):
        start = source.tell()
        count = sum(block.count(b"\n") for block in iter(lambda: source.read(1 << 20), b""))
        source.seek(start)
    return count


def flow(
    pipeline: Pipeline,
    source: BinaryIO,
    name: str,
    write: Callable[[bytes], object],
    search: Search,
    batch_tokens: int,
) -> None:
    """Translate a text: from a terminal line by line, otherwise with a bar.

    Args:
        pipeline: the model.
        source, name: the text, and its name for messages.
        write: called with the translations of each chunk of lines.
        search, batch_tokens: see `Pipeline.translate`.

    Raises:
        AdminError: a line is not UTF-8, or the text cannot be read.
    """
    if source.isatty():
        print("fairseq-admin: type a sentence a line; Ctrl-D ends.", file=sys.stderr)
        chunks, shown = read_lines(source, name, 1), bar("translate", 0, " lines", hidden=True)
    else:
        chunks, shown = read_lines(source, name, CHUNK), bar("translate", lines_of(source, name), " lines")
    first, removed = 1, Counter[str]()
    with shown:
        for lines in chunks:
            removed += pipeline.text.removed(lines) if pipeline.text else Counter()
            translated = pipeline.translate(lines, search, batch_tokens, first, shown.update)
            shown.clear()  # otherwise a terminal would show the first line after the bar
            rows = (formatted(number, translations, search) for number, translations in enumerate(translated, first))
            write("".join(rows).encode("utf-8"))
            first += len(lines)
            shown.n = first - 1  # count lines instead of pieces: a line may have none or several
    if removed:
        print(f"fairseq-admin: {name}: {removal_note(removed)}.", file=sys.stderr)
