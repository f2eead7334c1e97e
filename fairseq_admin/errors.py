"""What a user did that cannot work, said in one line."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from types import TracebackType


class AdminError(ValueError):
    """A user's mistake. The message says what was found, what was expected and what to do."""


class DivergedError(AdminError):
    """Training has diverged: update after update is skipped."""


def line(error: BaseException) -> str:
    """The first line of an error's text, or else its name; of the system's errors the file and the reason."""
    if isinstance(error, OSError) and error.strerror:  # fairseq's own have none
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


DIVERGED = 3
"""Exit status of a training run that diverged; a user's mistake gives 2, a crash 1."""

INTERRUPTED = 130
"""The exit status of a command that Ctrl-C ended: 128 and the number of the signal, as shells have it."""

DIVERGED_ADVICE = (
    "Resume from an earlier checkpoint (--restore-file) with a lower --lr, a longer --warmup-updates or "
    "--clip-norm 1.0. crash.pt holds the diverged model: do not resume from it."
)

# Where fairseq starts the processes itself (one per GPU), an error in one comes back as the text of its traceback.
_OURS = re.compile(r"^fairseq_admin\.errors\.(AdminError|DivergedError): (.+)$", re.MULTILINE)
_NOT_FINITE = re.compile(r"^FloatingPointError\b(.*)$", re.MULTILINE)
APART = "inconsistent between workers"


def interrupted() -> int:
    """Say that Ctrl-C ended a command of ours; its exit status."""
    print("fairseq-admin: interrupted.", file=sys.stderr)
    return INTERRUPTED


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _text(error: BaseException) -> str:
    """The traceback of another process that an error reports; empty if it reports none."""
    return str(error) if type(error).__name__ == "ProcessRaisedException" else ""


ONE_OF_EACH = (
    "the task is for fairseq's models with several encoders and decoders, and this one has one of each. For several "
    "languages give --task translation_multi_simple_epoch."
)


def _wants_several(error: BaseException) -> bool:
    """Whether multilingual_translation or semisupervised_translation has met a model with one encoder and one decoder.

    The former first reads an option of its own, which only a MultiModel has, from the model's options.
    """
    return "requires a FairseqMultiModel" in str(error) or getattr(error, "full_key", None) == "model.left_pad_source"


def _stop(error: BaseException) -> AdminError | None:
    """The AdminError behind an error, here or in a process that torch.multiprocessing.spawn started."""
    for cause in _chain(error):
        if isinstance(cause, AdminError):
            return cause
        if _wants_several(cause):
            return AdminError(ONE_OF_EACH)
        for name, message in _OURS.findall(_text(cause)):
            return DivergedError(message) if name == "DivergedError" else AdminError(message)
    return None


def _not_finite(error: BaseException) -> bool:
    """Whether fairseq has found a loss or gradient that is not finite, here or in a process that it started.

    fairseq raises the same error when the workers of a run get out of sync; that is not divergence.
    """
    found = [str(error)] if isinstance(error, FloatingPointError) else _NOT_FINITE.findall(_text(error))
    return any(APART not in message for message in found)


def install_excepthook() -> None:
    """Let an uncaught AdminError end the process with its one line and exit status 2, and divergence with DIVERGED.

    fairseq's command lines catch nothing and print tracebacks, so this is the only place where the plugin can act. The
    error is found beneath whatever fairseq raised on top of it, even in a process that fairseq started; every other
    exception goes to the previous hook. Ctrl-C while fairseq-admin is still importing torch ends that command alone.
    """
    previous = sys.excepthook
    if previous.__module__ == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # CPython ends the process with the status of a SystemExit that a hook raises.
        if stop := _stop(error):
            print(f"fairseq-admin: {stop}", file=sys.stderr)
            raise SystemExit(DIVERGED if isinstance(stop, DivergedError) else 2)
        if issubclass(kind, KeyboardInterrupt) and os.path.basename(sys.argv[0]) == "fairseq-admin":
            raise SystemExit(interrupted())
        previous(kind, error, trace)
        # fairseq's search for the culprit may itself fail on top of it (NanDetector does, with today's torch).
        if any(map(_not_finite, _chain(error))):
            print(f"fairseq-admin: training diverged. {DIVERGED_ADVICE}", file=sys.stderr)
            raise SystemExit(DIVERGED)

    sys.excepthook = hook
