"""What every step shares: whole files or none, text read line by line, errors in one line."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A name beside `path` to write to; it takes `path`'s place only when the block ends without an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def read_lines(path: str | Path) -> list[str]:
    """The lines of a UTF-8 text. Only a newline ends a line: U+2028 and its kind stay inside.

    Raises:
        ValueError: the file is missing, or a line is not UTF-8.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; expected a text, one sentence a line. Check the path.") from None
    if not lines[-1]:
        lines.pop()
    text = []
    for number, line in enumerate(lines, start=1):
        try:
            text.append(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            byte = f"0x{line[error.start]:02x}"
            raise ValueError(
                f"{path}: line {number} is not UTF-8 (byte {byte} at column {error.start + 1}); "
                "convert the file first, for instance with iconv -f latin1 -t utf-8."
            ) from None
    return text


def write_lines(path: str | Path, lines: Iterable[str]) -> None:
    """Write the lines as UTF-8, all of them or no file."""
    with replacing(path) as part, part.open("w", encoding="utf-8", newline="\n") as out:
        out.writelines(f"{line}\n" for line in lines)


def run(main: Callable[[], None]) -> None:
    """Run a step's main: what the user can mend is one line on stderr and exit status 2, not a traceback."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        main()
    except ValueError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
