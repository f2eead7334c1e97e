"""The outcome of a run: learned, plateau or diverged, and its loss at the end.

H is the entropy of one target token, end of sentence included, over the training set: the loss of a model that knows
only how frequent every word is.

    diverged   it stopped because a loss or gradient was no longer finite, update after update overflowed; or the last
               loss is not finite, or above 1.5 H: confidently wrong
    plateau    the last validation is above 0.8 H. (On the generated corpus a model that ends every sentence where it
               should, and guesses the words, is at 0.92 H: still on the plateau.)
    learned    otherwise

The loss at the end is the mean of the last validations, since one alone is noisy.
"""

from __future__ import annotations

import math
from typing import Any

from fairseq_admin.logs import Log

PLATEAU, EXPLODED = 0.8, 1.5
LAST = 4
"""Validations whose mean is the outcome."""
FALLING = 0.02
"""Share of the mean before by which a run that is still falling ends lower."""


def verdict(log: Log, entropy: float, stopped: bool) -> tuple[str, int | None]:
    """The verdict on a finished run, and the update at which it diverged (the last one logged, or the first bad loss).

    Args:
        entropy: H, in bits per token.
        stopped: whether training stopped itself because it had diverged.
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
    """The mean of the last validations, nan without any. Bits per token, by update."""
    last = [valid[update] for update in sorted(valid)[-LAST:]]
    return sum(last) / len(last) if last else math.nan


def still_falling(valid: dict[int, float]) -> bool:
    """Whether the outcome is clearly below the mean of as many validations before; never with too few to tell."""
    before = {update: valid[update] for update in sorted(valid)[-2 * LAST : -LAST]}
    return len(before) == LAST and mean_of_last(valid) < (1 - FALLING) * mean_of_last(before)


def _bounded(row: dict[str, Any], bits: float | None) -> float:
    bound = EXPLODED * row["entropy"]
    return min(bits, bound) if bits is not None and math.isfinite(bits) else bound


def last(row: dict[str, Any]) -> float:
    """A run's last loss on validation, as `loss` bounds it: by it the rate was chosen that further seeds run at."""
    return _bounded(row, row["bits"])


def loss(row: dict[str, Any]) -> float:
    """A run's outcome, in bits per token; of one that diverged the bound beyond which a run has, and no more of any."""
    return _bounded(row, None if row["verdict"] == "diverged" else mean_of_last(row["valid"]))
