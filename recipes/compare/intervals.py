"""Confidence intervals over the seeds, and how they are written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from scipy import stats

LEVEL = 0.95
FEWEST = 3
"""Seeds that a difference needs."""
NOT_SHOWN = "no difference shown"


@dataclass(frozen=True)
class Interval:
    """An estimate and its confidence interval; `count` is of the seeds of its smallest group."""

    mean: float
    low: float
    high: float
    count: int

    def __format__(self, digits: str) -> str:
        return f"{self.mean:{digits}} ({self.low:{digits}} to {self.high:{digits}})"


def contrast(groups: Sequence[tuple[float, Sequence[float]]], level: float = LEVEL) -> Interval:
    """The sum of weight x mean over independent groups, with the degrees of freedom of Satterthwaite (1946).

    One group with weight 1 has Student's interval, two with 1 and -1 have Welch's. Of one value there is none (nan).

    Args:
        groups: the weight and the values of each.
    """
    mean, count = sum(weight * fmean(values) for weight, values in groups), min(len(values) for _, values in groups)
    if count < 2:
        return Interval(mean, math.nan, math.nan, count)
    parts = [(weight**2 * variance(values) / len(values), len(values) - 1) for weight, values in groups]
    error = sum(part for part, _ in parts)
    reach = 0.0
    if error:
        freedom = error**2 / sum(part**2 / less for part, less in parts)
        reach = float(stats.t.ppf((1 + level) / 2, freedom)) * math.sqrt(error)
    return Interval(mean, mean - reach, mean + reach, count)


def with_interval(values: Sequence[float], digits: str) -> str:
    """The mean and its interval; of too few seeds for one that says something, the values themselves."""
    if len(values) < FEWEST:
        return ", ".join(f"{value:{digits}}" for value in values)
    return f"{contrast([(1, values)]):{digits}}"


def judged(interval: Interval | None, lower_is_better: bool) -> str:
    """Whether a difference is shown: `ahead`, `behind` or NOT_SHOWN."""
    if interval is None or interval.count < FEWEST:
        return f"fewer than {FEWEST} seeds"
    if interval.low <= 0 <= interval.high:
        return NOT_SHOWN
    return "ahead" if (interval.high < 0) == lower_is_better else "behind"


def in_words(interval: Interval | None, digits: str, lower_is_better: bool) -> str:
    said = judged(interval, lower_is_better)
    return f"{said}: {interval:{digits}}" if interval and interval.count >= FEWEST else said
