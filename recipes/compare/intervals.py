"""Confidence intervals over the seeds, and how they are written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
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


def contrast(groups: Sequence[tuple[float, Any]], level: float = LEVEL) -> Interval:
    """The sum of weight x mean over independent groups, with the degrees of freedom of Satterthwaite (1946).

    One group with weight 1 has Student's interval, two with 1 and -1 have Welch's. Of one value there is none (nan).

    Args:
        groups: the weight and the values of each. Shape (n,), or (draws, n) for as many intervals, as arrays.

    Raises:
        ValueError: a group is empty.
    """
    sizes = [np.shape(values)[-1] for _, values in groups]
    if min(sizes) < 1:
        raise ValueError("no value to average: expected one or more.")
    mean: Any = np.sum([weight * np.mean(values, axis=-1) for weight, values in groups], axis=0)
    if min(sizes) < 2:
        return Interval(float(mean), math.nan, math.nan, min(sizes))
    parts = [weight**2 * np.var(values, axis=-1, ddof=1) / n for (weight, values), n in zip(groups, sizes)]
    error = sum(parts)
    with np.errstate(invalid="ignore"):
        freedom = error**2 / sum(part**2 / (n - 1) for part, n in zip(parts, sizes))
    reach = np.nan_to_num(stats.t.ppf((1 + level) / 2, freedom) * np.sqrt(error))  # 0 where all values are equal
    return Interval(mean, mean - reach, mean + reach, min(sizes))


def with_interval(values: Sequence[float], digits: str) -> str:
    """The mean and its interval; of too few seeds for one that says something, the values themselves."""
    if len(values) < FEWEST:
        return ", ".join(f"{value:{digits}}" for value in values)
    return f"{contrast([(1, values)]):{digits}}"


def with_range(values: Sequence[float | None], digits: int) -> str:
    """Mean and range, of the runs that have a finite value."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return "-"
    mean = f"{sum(finite) / len(finite):.{digits}f}"
    return mean if len(finite) == 1 else f"{mean} ({min(finite):.{digits}f} to {max(finite):.{digits}f})"


def judged(found: Interval | None, lower_is_better: bool) -> str:
    """What a difference shows: `ahead`, `behind`, or that it shows none."""
    if found is None or found.count < FEWEST:
        return f"fewer than {FEWEST} seeds"
    if found.low <= 0 <= found.high:
        return NOT_SHOWN
    return "ahead" if (found.high < 0) == lower_is_better else "behind"


def in_words(found: Interval | None, digits: str, lower_is_better: bool) -> str:
    said = judged(found, lower_is_better)
    return f"{said}: {found:{digits}}" if found and found.count >= FEWEST else said
