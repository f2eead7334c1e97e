"""What a user did that cannot work, said in one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import TracebackType


class AdminError(ValueError):
    """A user's mistake. The message says what was found, what was expected and what to do."""


class DivergedError(AdminError):
    """Training has diverged: the optimizer refuses update after update."""


DIVERGED = 3
"""The exit status of a training that has diverged; a user's mistake has 2, and a crash 1."""

DIVERGED_ADVICE = (
    "Resume from an earlier checkpoint (--restore-file) with a lower --lr, a longer --warmup-updates or "
    "--clip-norm 1.0; under fp16 also try --amp. crash.pt holds the diverged model: do not resume from it."
)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _diverged(error: BaseException) -> bool:
    """Whether an error says that training has diverged: ours, or fairseq's for a loss or gradient that is not finite.

    fairseq raises its own, too, where workers of one run have come apart; that is not the model's doing.
    """
    if isinstance(error, FloatingPointError):
        return "inconsistent between workers" not in str(error)
    return isinstance(error, DivergedError)


def install_excepthook() -> None:
    """Let an uncaught AdminError end the process with its one line and exit status 2, and divergence with DIVERGED.

    fairseq's command lines catch nothing and print tracebacks, so the plugin can only reach them here. The error is
    found behind whatever fairseq raised on top of it; every other exception goes to the hook that was there before.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # CPython ends the process with the status of a SystemExit that a hook raises.
        for cause in _chain(error):
            if isinstance(cause, AdminError):
                print(f"fairseq-admin: {cause}", file=sys.stderr)
                raise SystemExit(DIVERGED if _diverged(cause) else 2)
        previous(kind, error, trace)
        # fairseq's search for the culprit may itself fail on top of it (NanDetector does, with today's torch).
        if any(map(_diverged, _chain(error))):
            print(f"fairseq-admin: training diverged. {DIVERGED_ADVICE}", file=sys.stderr)
            raise SystemExit(DIVERGED)

    sys.excepthook = hook
