"""How the command fairseq-admin ends before its time: Ctrl-C, a signal, a closed or full standard output."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TextIO

from .errors import AdminError, line


class Stopped(BaseException):
    """A signal asked the process to end. No `except Exception` holds it up, and what it was writing is removed."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number
        """The exit status that a shell gives to a process ended by this signal."""


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """In this block SIGTERM, and SIGHUP of a closed terminal, raise `Stopped` instead of ending the process at once."""

    def stop(number: int, _: FrameType | None) -> None:
        raise Stopped(number)

    ours = []
    if threading.current_thread() is threading.main_thread():  # no other one may set handlers
        ours = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def open_closed_streams() -> None:
    """Let the three standard descriptors that the process was started without lead nowhere.

    Otherwise the next file that is opened takes such a number, and what a library prints goes into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")


def printable(text: str, stream: TextIO | None) -> str:
    """The text as a stream takes it: what it has no letters for is escaped, as on standard error.

    So is a file's name that is not UTF-8.
    """
    if stream is None or stream.errors != "strict":
        return text
    return text.encode(stream.encoding, "backslashreplace").decode(stream.encoding)


class Closed(Exception):
    """Whoever reads standard output has closed it: they have read enough, and that is no error."""


@contextlib.contextmanager
def standard_output(stream: TextIO | None) -> Iterator[None]:
    """A block that writes to standard output and does nothing else; it is flushed at the end.

    Args:
        stream: sys.stdout, or what it was before it was redirected; None: it is closed.

    Raises:
        AdminError: it cannot be written, as on a full disk.
        Closed: nobody reads it any more.
    """
    try:
        yield
        if stream is not None:
            stream.flush()
    except OSError as error:
        # Python will flush what is left at the end, and would fail again.
        assert stream is not None
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if isinstance(error, BrokenPipeError):
            raise Closed from None
        raise AdminError(f"standard output: could not be written ({line(error)}). Is the disk full?") from None
