"""Statistics of a comparison, from losses to numbers with intervals.

The outcome of a run is the mean of its last validations: one alone is noise on top of an effect. A run is *still
falling* if that mean is clearly below the one of as many validations before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

LAST = 4
"""Validations whose mean is the outcome."""
FALLING = 0.02
"""Share of the mean before by which a run that is still falling ends lower."""
LEVEL = 0.95
FEWEST = 3
"""Seeds that a difference needs."""


@dataclass(frozen=True)
class Interval:
    """A mean over the seeds and its confidence interval; of fewer than two values there is none (nan)."""

    mean: float
    low: float
    high: float
    count: int

    def __format__(self, digits: str) -> str:
        return f"{self.mean:{digits}} ({self.low:{digits}} to {self.high:{digits}})"


def interval(values: Sequence[float]) -> Interval:
    """Student's t over independent values.

    Raises:
        ValueError: there is no value.
    """
    if not values:
        raise ValueError("no value to average: expected one or more.")
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return Interval(mean, math.nan, math.nan, len(values))
    low, high = (
        stats.t.interval(LEVEL, len(values) - 1, mean, stats.sem(values)) if len({*values}) > 1 else (mean, mean)
    )
    return Interval(mean, float(low), float(high), len(values))


def welch(ours: Sequence[float], theirs: Sequence[float]) -> Interval | None:
    """The ratio of our losses to theirs, less one, by Welch's interval on their logarithms; None of too few seeds.

    The seeds of the two are independent: pairing them by number brings nothing.
    """
    if min(len(ours), len(theirs)) < FEWEST:
        return None
    one, other = ([math.log(loss) for loss in losses] for losses in (ours, theirs))
    low, high = stats.ttest_ind(one, other, equal_var=False).confidence_interval(LEVEL)
    difference = sum(one) / len(one) - sum(other) / len(other)
    return Interval(math.expm1(difference), math.expm1(low), math.expm1(high), min(len(one), len(other)))


def outcome(valid: dict[int, float]) -> float:
    """The mean of the last validations, nan without any. Bits per token, by update."""
    last = [valid[update] for update in sorted(valid)[-LAST:]]
    return sum(last) / len(last) if last else math.nan


def still_falling(valid: dict[int, float]) -> bool:
    """Whether a run would be lower yet, if it went on; never of one with too few validations to tell."""
    before = {update: valid[update] for update in sorted(valid)[-2 * LAST : -LAST]}
    return len(before) == LAST and outcome(valid) < (1 - FALLING) * outcome(before)


def told(values: Sequence[float], digits: str) -> str:
    """The mean and its interval; of too few seeds for one that says something, the values themselves."""
    if len(values) < FEWEST:
        return ", ".join(f"{value:{digits}}" for value in values)
    return f"{interval(values):{digits}}"
