"""Confidence intervals over the seeds, and their wording."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from scipy import stats

LEVEL = 0.95
FEWEST = 3
"""Number of seeds that a claim about a difference needs."""
NOT_SHOWN = "no difference shown"


@dataclass(frozen=True)
class Interval:
    """An estimate and its confidence interval; `count` is the number of seeds in the smallest group."""

    mean: float
    low: float
    high: float
    count: int

    def __format__(self, digits: str) -> str:
        return f"{self.mean:{digits}} ({self.low:{digits}} to {self.high:{digits}})"


def contrast(groups: Sequence[tuple[float, Sequence[float]]], level: float = LEVEL) -> Interval:
    """The interval of Σ weight x mean over independent groups, with the degrees of freedom of Satterthwaite (1946).

    One group with weight 1 gives Student's interval; two groups with weights 1 and -1 give Welch's. If a group has one
    value, the bounds are nan.

    Args:
        groups: weight and values of each group.
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
    """The mean and its interval; with fewer than FEWEST values, the values themselves."""
    if len(values) < FEWEST:
        return ", ".join(f"{value:{digits}}" for value in values)
    return f"{contrast([(1, values)]):{digits}}"


def judged(interval: Interval | None, lower_is_better: bool) -> str:
    """What an interval of a difference shows: `ahead`, `behind`, NOT_SHOWN, or that there are too few seeds."""
    if interval is None or interval.count < FEWEST:
        return f"fewer than {FEWEST} seeds"
    if interval.low <= 0 <= interval.high:
        return NOT_SHOWN
    return "ahead" if (interval.high < 0) == lower_is_better else "behind"


def in_words(interval: Interval | None, digits: str, lower_is_better: bool) -> str:
    verdict = judged(interval, lower_is_better)
    return f"{verdict}: {interval:{digits}}" if interval and interval.count >= FEWEST else verdict
