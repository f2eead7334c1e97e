"""Shared by every step: files written whole or not at all, text read line by line, errors in one line."""

from __future__ import annotations

import logging
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from recipes.steps.guard import use_environment


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A name next to `path` to write to; it takes `path`'s place only when the block ends without an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{platform.node()}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def writing(*paths: str | Path) -> Iterator[list[BinaryIO]]:
    """The files to write: all of them whole, or none."""
    with ExitStack() as replaced:
        parts = [replaced.enter_context(replacing(path)) for path in paths]
        try:
            # Closing may find the disk full, so all are closed before the first takes its place.
            with ExitStack() as opened:
                yield [opened.enter_context(part.open("wb")) for part in parts]
        except OSError as error:
            error.filename = error.filename or paths[0]
            raise


def read_lines(path: str | Path) -> list[str]:
    """The lines of a UTF-8 text. Only a newline ends a line: U+2028 and the like stay inside.

    Raises:
        ValueError: a line is not UTF-8.
    """
    with open(path, "rb") as file:
        return decoded(file.readlines(), path)


def decoded(lines: list[bytes], path: str | Path, first: int = 1, errors: str = "strict") -> list[str]:
    """The lines as text, without their newlines.

    Args:
        lines: as they are in the file.
        path: the file, for the message.
        first: number of the first line, for the message.
        errors: what is done where one is not UTF-8.

    Raises:
        ValueError: one is not UTF-8, and that is strict.
    """
    try:
        text = b"".join(lines).decode("utf-8", errors).split("\n")
    except UnicodeDecodeError as error:
        before = error.object[: error.start]
        number, column = first + before.count(b"\n"), error.start - before.rfind(b"\n")
        raise ValueError(
            f"{path}: line {number} is not UTF-8 (byte 0x{error.object[error.start]:02x} at column {column}); convert "
            "the file first, for instance with iconv -f latin1 -t utf-8."
        ) from None
    return text if text[-1] else text[:-1]


def write_lines(path: str | Path, lines: Iterable[str]) -> None:
    """Write the lines as UTF-8, all of them or no file."""
    with writing(path) as (out,):
        out.writelines(f"{line}\n".encode() for line in lines)


def run(main: Callable[[], None]) -> None:
    """Run a program's main: a mistake of the user is one line on stderr and exit status 2, not a traceback."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    status, message = 2, ""
    try:
        use_environment()
        return main()
    except ValueError as error:
        message = str(error)
    except BrokenPipeError:
        # The reader of the output has closed it. Python would write the rest at its end, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 128 + signal.SIGPIPE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        message = f"{where}{error.strerror or error}. Check the path and its permissions, or make room, and run again."
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    if message:
        print(message, file=sys.stderr)
    raise SystemExit(status)
