"""Shared by every step: files written completely or not at all, text read line by line, errors in one line."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from fairseq_admin.outputs import replacing
from recipes.steps.guard import use_environment

STOP = (signal.SIGTERM, signal.SIGUSR2)
"""The signals that ask a process to stop. Slurm sends SIGTERM before it preempts a job, SIGUSR2 before a time limit."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit status of a process that was asked to stop."""


@contextmanager
def replacing_files(*paths: str | Path) -> Iterator[list[BinaryIO]]:
    """Files to write. They replace `paths` when the block ends without an error."""
    for path in paths:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as replaced:
        parts = [replaced.enter_context(replacing(Path(path))) for path in paths]
        try:
            # Closing a file may fail on a full disk, so all are closed before the first replaces its path.
            with ExitStack() as opened:
                yield [opened.enter_context(part.open("wb")) for part in parts]
        except OSError as error:
            error.filename = error.filename or paths[0]
            raise


def read_lines(path: str | Path) -> list[str]:
    """The lines of a UTF-8 text. Only a newline ends a line; U+2028 and the like do not.

    Raises:
        ValueError: a line is not UTF-8.
    """
    with open(path, "rb") as file:
        return decoded(file.readlines(), path)


def decoded(lines: list[bytes], path: str | Path, first: int = 1, errors: str = "strict") -> list[str]:
    """Decode lines, and remove their newlines.

    Args:
        lines: as they are in the file.
        path: the file, for the message.
        first: number of the first line, for the message.
        errors: how to treat bytes that are not UTF-8, as for bytes.decode.

    Raises:
        ValueError: a line is not UTF-8, and `errors` is strict.
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
    """Write lines as UTF-8, completely or not at all."""
    with replacing_files(path) as (out,):
        out.writelines(f"{line}\n".encode() for line in lines)


def run(main: Callable[[], None]) -> None:
    """Run the main function of a program.

    A user's mistake is reported in one line on stderr, with exit status 2 and without a traceback. The signals STOP act
    as Ctrl-C does; worker processes end at once.
    """
    for number in STOP:
        signal.signal(number, signal.default_int_handler)
    os.register_at_fork(after_in_child=lambda: [signal.signal(number, signal.SIG_DFL) for number in STOP])
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    status, message = 2, ""
    try:
        use_environment()
        return main()
    except ValueError as error:
        message = str(error)
    except BrokenPipeError:
        # The reader has closed our output. Python would try to flush the rest when it exits, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 128 + signal.SIGPIPE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        message = f"{where}{error.strerror or error}. Check the path and its permissions, or make room, and run again."
    except KeyboardInterrupt:
        status = INTERRUPTED
    if message:
        print(message, file=sys.stderr)
    raise SystemExit(status)
