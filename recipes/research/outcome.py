"""The outcome of a run: diverged, plateau or learned, and its loss at the end.

H is the entropy of one target token over the training set, ends of sentences included. A model that knows only the
frequency of each word has this loss.

    diverged   the training stopped because losses or gradients were not finite; or its last loss is not finite, or is
               above 1.5 H, which is confidently wrong
    plateau    the last validation is above 0.8 H. (On the generated corpus, a model that ends sentences correctly but
               guesses the words has 0.92 H.)
    learned    all other runs

The loss at the end is the mean of the last validations, since a single validation is noisy.
"""

from __future__ import annotations

import math
from typing import Any

from fairseq_admin.logs import Log

PLATEAU, EXPLODED = 0.8, 1.5
LAST = 4
"""Number of last validations whose mean is the loss at the end."""
FALLING = 0.02
"""A run is still falling if the loss at the end is lower, by this share, than the mean of the validations before."""


def verdict(log: Log, entropy: float, stopped: bool) -> tuple[str, int | None]:
    """The verdict on a finished run, and the update at which it diverged.

    That update is the last one in the log if the training stopped itself, otherwise the first with a bad loss.

    Args:
        entropy: H, in bits per token.
        stopped: whether the training stopped itself because it diverged.
    """
    bad: dict[int, bool] = {}
    for update, bits in sorted([*log.train.items(), *log.valid.items()], key=lambda point: point[0]):
        bad[update] = bad.get(update, False) or not bits <= EXPLODED * entropy  # nan is bad
    if stopped:
        return "diverged", max(bad, default=0)
    if bad[max(bad)]:
        good = max((update for update in bad if not bad[update]), default=-1)
        return "diverged", next(update for update in bad if update > good)
    return "plateau" if log.valid[max(log.valid)] > PLATEAU * entropy else "learned", None


def mean_of_last(valid: dict[int, float]) -> float:
    """The mean of the last validations; nan without validations.

    Args:
        valid: bits per token, by update.
    """
    last = [valid[update] for update in sorted(valid)[-LAST:]]
    return sum(last) / len(last) if last else math.nan


def still_falling(valid: dict[int, float]) -> bool:
    """Whether the loss at the end is clearly below the mean of the validations before; False if there are too few."""
    before = {update: valid[update] for update in sorted(valid)[-2 * LAST : -LAST]}
    return len(before) == LAST and mean_of_last(valid) < (1 - FALLING) * mean_of_last(before)


def bounded(row: dict[str, Any], bits: float | None) -> float:
    """A loss of a run, at most 1.5 H; 1.5 H if it is missing or not finite."""
    bound = EXPLODED * row["entropy"]
    return min(bits, bound) if bits is not None and math.isfinite(bits) else bound


def last(row: dict[str, Any]) -> float:
    """A run's last validation, bounded as in `loss`. It decides the best rate, at which further seeds run."""
    return bounded(row, row["bits"])


def loss(row: dict[str, Any]) -> float:
    """A run's loss at the end, in bits per token, at most 1.5 H. A diverged run counts as 1.5 H."""
    return bounded(row, None if row["verdict"] == "diverged" else mean_of_last(row["valid"]))
