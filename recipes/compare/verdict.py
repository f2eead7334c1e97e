"""Did a run learn, stay on the plateau, or diverge? The rule, in one place.

H is the entropy of one target token, end of sentence included, over the training set: the loss of a model that knows
how frequent every word is and nothing else.

    diverged   it stopped because a loss or gradient was no longer finite, or update after update overflowed;
               or the last loss is not finite, or above 1.5 H: confidently wrong
    plateau    the last validation is above 0.8 H. (On the generated corpus a model that ends every sentence where it
               should, and guesses the words, is at 0.92 H: still on the plateau.)
    learned    else
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from recipes.steps.logs import Log

PLATEAU, EXPLODED = 0.8, 1.5
VERDICTS = ("diverged", "plateau", "learned")


@dataclass(frozen=True)
class Verdict:
    """How a run ended; `update` is where it diverged (the last logged, or the first bad loss), else None."""

    kind: str
    update: int | None = None


def verdict(log: Log, entropy: float, stopped: bool) -> Verdict:
    """Judge a finished run.

    Args:
        entropy: H, in bits per token.
        stopped: whether training stopped itself because it had diverged.
    """
    losses = sorted([*log.train.items(), *log.valid.items()])
    if stopped:
        return Verdict("diverged", losses[-1][0] if losses else 0)
    bad = [not (math.isfinite(bits) and bits <= EXPLODED * entropy) for _, bits in losses]
    if bad[-1]:
        good = max((place for place, is_bad in enumerate(bad) if not is_bad), default=-1)
        return Verdict("diverged", losses[good + 1][0])
    if log.valid[max(log.valid)] > PLATEAU * entropy:
        return Verdict("plateau")
    return Verdict("learned")


def left_plateau(valid: dict[int, float], entropy: float) -> float | None:
    """The update at which validation fell below the plateau's bound; between two validations, on the straight line.

    None if it never does.
    """
    bound = PLATEAU * entropy
    before: tuple[int, float] | None = None
    for update, bits in sorted(valid.items()):
        if bits < bound:
            if before is None or not math.isfinite(before[1]):
                return float(update)
            return before[0] + (update - before[0]) * (before[1] - bound) / (before[1] - bits)
        before = update, bits
    return None
