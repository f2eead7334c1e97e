"""One-line errors that a user can fix, and the code that ends a process with one."""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType


class AdminError(ValueError):
    """A user's mistake. The message says what was found, what was expected and what to do."""


class DivergedError(AdminError):
    """Training has diverged: update after update is skipped."""


def line(error: BaseException) -> str:
    """Shorten an error to one line.

    Args:
        error: any.

    Returns:
        The first line of its text, or its class. For a system error: file and reason.
    """
    if isinstance(error, OSError) and error.strerror:  # fairseq raises some without one
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def explained(fault: str, advice: str) -> Iterator[None]:
    """A block in which fairseq uses an input without checking it, so a wrong input may raise any error.

    Args:
        fault: what the user is told, before the error in parentheses.
        advice: what to do, after it.

    Raises:
        AdminError: the block failed.
    """
    try:
        yield
    except AdminError:
        raise
    except Exception as error:
        raise AdminError(f"{fault} ({line(error)}). {advice}") from None


MISTAKE = 2
"""Exit status of a user's mistake; a crash gives 1."""
DIVERGED = 3
"""Exit status of a training run that diverged."""
INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 plus the signal's number, as in a shell."""

DIVERGED_ADVICE = (
    "Resume from an earlier checkpoint (--restore-file) with a lower --lr, a longer --warmup-updates or "
    "--clip-norm 1.0. crash.pt, if there is one, holds the diverged model: do not resume from it."
)

_OURS = re.compile(r"^(?:\S+\.)?(Admin|Diverged)Error: (.+)$", re.MULTILINE)
_NOT_FINITE = re.compile(r"^FloatingPointError\b(?!.*inconsistent between workers)", re.MULTILINE)
"""fairseq's error for a loss or gradient that is not finite. It raises the same class when workers get out of sync."""


def end(message: str, status: int) -> int:
    """Say why the process ends.

    Args:
        message: one line, for standard error.
        status: the exit status.

    Returns:
        The exit status.
    """
    print(f"fairseq-admin: {message}", file=sys.stderr)
    return status


def outcome(error: BaseException) -> tuple[str, int] | None:
    """Find the line and the exit status of an error.

    This reads the traceback as text. The processes that fairseq starts, one per GPU, send errors back as text, and the
    text still names an error if fairseq raised another one after it. (Its NanDetector fails with today's torch.)

    Args:
        error: one that nothing caught.

    Returns:
        The line and the status. None: it is neither a user's mistake nor divergence.
    """
    text = "".join(traceback.format_exception(error))
    if ours := _OURS.findall(text):
        kind, message = ours[-1]
        return message, DIVERGED if kind == "Diverged" else MISTAKE
    if _NOT_FINITE.search(text):
        return f"training diverged. {DIVERGED_ADVICE}", DIVERGED
    return None


def install_excepthook() -> None:
    """End the process by `outcome` when nothing catches an error; leave other errors to the previous hook.

    fairseq's commands catch nothing and print tracebacks, so this hook is the plugin's only chance.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if (ended := outcome(error)) is None:
            previous(kind, error, trace)
            return
        # torch.distributed's hook calls this one and collects sys.stderr, which a SystemExit would lose.
        with contextlib.redirect_stderr(sys.__stderr__ or sys.stderr):
            raise SystemExit(end(*ended))  # CPython exits with the status of a SystemExit from a hook

    sys.excepthook = hook
