"""How the classifiers of `make deeper` came out: each scheme at its best rate, a row a scheme and depth.

    best rate       the most accurate on validation, with the first seed; `edge`: no rate beyond it was tried
    accuracy, test  of every seed at that rate
    vs.             the difference to another scheme at the same depth, seed by seed, and what it shows

Intervals and what a difference shows: recipes/compare/ranking.py. A run that diverged counts as a guess.
"""

from __future__ import annotations

from collections.abc import Sequence

from recipes.compare.intervals import with_interval
from recipes.compare.ranking import Ranking, rankings, rate, versus
from recipes.compare.rows import TITLES, Row

BASES = ("dt-fixup", "admin", "post-ln")


def accuracy(row: Row) -> float:
    """On the test set, which chose nothing. 0 to 1."""
    return row["test"]


def at_best_rates(rows: Sequence[Row]) -> list[Ranking]:
    """Each scheme and depth at the rate that is most accurate on validation, with the seed that every rate has."""
    return rankings(rows, lambda row: -row["valid"], lambda row: -accuracy(row))


def table(rows: Sequence[Row]) -> list[Row]:
    ranked = at_best_rates(rows)
    places = {(it.scheme, it.layers): it for it in ranked}
    written = []
    for it in ranked:
        runs = list(it.at_best.values())
        row = {"scheme": it.scheme, "new layers": it.layers, "best rate": rate(it, it)}
        row["diverged"] = f"{sum(run['diverged'] for run in runs)} of {len(runs)}"
        row["accuracy, test"] = with_interval(list(map(accuracy, runs)), ".3f")
        for base in BASES:
            row[f"vs. {TITLES[base]}"] = versus(it, places.get((base, it.layers)), accuracy, "+.3f", False)
        written.append(row)
    return written
