"""Comparison of the schemes of a grid, each at its own best learning rate, with intervals over the seeds.

The table of make compare has a row for each scheme and depth:

    best rate   the rate at which most seeds learned; among several, the rate with the lowest mean of the last
                validations. Only the seeds that tried every rate count. `edge`: it is the lowest or highest rate tried.
                `as good`: rates at which as many seeds learned, and whose loss is not shown to be higher (three seeds
                or more)
    window      the rates at which every seed learned
    bits, BLEU  the loss at the end (the mean of the last four validations), and the score of the test set, by which
                nothing was chosen; with one or two seeds, each value
    falling     the runs that end more than 2 % below the mean of the four validations before
    vs. Admin   the difference to Admin's row, seed by seed. Runs with the same seed have the same batches in the same
                order. The interval spans the intervals at the best rate and at all rates that are as good as the best,
                so no verdict depends on the choice among these rates
    Welch       the ratio of the losses, minus one, by Welch's interval on their logarithms. Seeds are not paired

The table of make deeper:

    best rate       the most accurate rate on validation, with the first seed
    accuracy, test  the accuracy of every seed at that rate; a diverged run counts as a guess
    vs.             the difference to another scheme at the same depth, seed by seed

The tables of make sensitivity and make warmup have the rates at which a scheme learns with every seed.

Intervals are Student's t at 95 % over the seeds. A difference is shown if its interval, from three seeds or more, is on
one side of zero. Many rows are compared at once, so one in twenty is shown by chance. For a diverged run,
the loss is set to the bound above which a run is called diverged, and BLEU to 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from recipes.research.intervals import FEWEST, NOT_SHOWN, Interval, contrast, in_words, judged, with_interval
from recipes.research.outcome import last, loss, still_falling
from recipes.research.rows import TITLES, Row
from recipes.steps.results import grouped

BASE = "admin"
DEEPER_BASES = ("dt-fixup", "admin", "post-ln")
OPTIMIZERS = {"": "", "radam": ", RAdam", "adam": ", Adam", "sgd": ", SGD"}
Seeds = dict[str, Row]
Measure = Callable[[Row], float]


def score(row: Row) -> float:
    """A run's BLEU on the test set."""
    return row["bleu"] or 0.0


def accuracy(row: Row) -> float:
    """A classifier's accuracy on the test set, 0 to 1."""
    return row["test"]


def learned(runs: Seeds) -> int:
    return sum(row.get("verdict") == "learned" for row in runs.values())


@dataclass(frozen=True)
class Ranking:
    """A scheme at one depth: its runs by rate (ascending) and seed, its best rate, and the rates as good as it."""

    scheme: str
    layers: str
    runs: dict[str, Seeds]
    best: str
    as_good: list[str]

    @property
    def at_best(self) -> Seeds:
        return self.runs[self.best]

    @property
    def window(self) -> list[str]:
        return [rate for rate, runs in self.runs.items() if learned(runs) == len(runs)]


def with_seeds_of_all(runs: dict[str, Seeds]) -> dict[str, Seeds]:
    """The runs of seeds that tried every rate, so that all rates have the same seeds. Without such seeds, all runs."""
    seeds = set.intersection(*map(set, runs.values()))
    return {rate: {seed: rows[seed] for seed in rows if not seeds or seed in seeds} for rate, rows in runs.items()}


def paired(ours: Seeds, theirs: Seeds, measure: Measure) -> Interval | None:
    """The difference of a measure, ours minus theirs, over the seeds that both have; None if they share no seed."""
    differences = [measure(ours[seed]) - measure(theirs[seed]) for seed in ours if seed in theirs]
    return contrast([(1, differences)]) if differences else None


def rankings(rows: Sequence[Row]) -> list[Ranking]:
    """A ranking for each scheme and depth, in order of appearance."""
    classified = "diverged" in rows[0]

    def order(runs: Seeds) -> tuple[float, ...]:
        chosen_by = [-row["valid"] if classified else last(row) for row in runs.values()]
        return -learned(runs), fmean(chosen_by)

    def no_higher(runs: Seeds, best: Seeds) -> bool:
        ours, theirs = with_seeds_of_all({"other": runs, "best": best}).values()
        apart = paired(ours, theirs, accuracy if classified else loss)
        return learned(ours) >= learned(theirs) and judged(apart, not classified) in (NOT_SHOWN, "ahead")

    ranked = []
    for (scheme, layers), tried in grouped(rows, "scheme", "layers").items():
        rates = sorted(grouped(tried, "lr").items(), key=lambda item: float(item[0][0]))
        runs = {rate: {row["seed"]: row for row in same} for (rate,), same in rates}
        shared = with_seeds_of_all(runs)
        best = min(runs, key=lambda rate: order(shared[rate]))
        others = [rate for rate in runs if rate != best and no_higher(runs[rate], runs[best])]
        ranked.append(Ranking(scheme, layers, runs, best, others))
    return ranked


def difference(one: Ranking, other: Ranking, measure: Measure) -> Interval | None:
    """The difference of a measure between two schemes at their best rates; None if they share no seed there.

    The interval spans the intervals at all pairs of rates: each scheme's best rate, or one that is as good as its best.
    """
    best = paired(one.at_best, other.at_best, measure)
    if best is None:
        return None
    pairs = itertools.product((one.best, *one.as_good), (other.best, *other.as_good))
    intervals = [paired(one.runs[ours], other.runs[theirs], measure) for ours, theirs in pairs]
    ends = [(one.low, one.high) for one in intervals if one and one.count >= min(best.count, FEWEST)]
    return Interval(best.mean, min(low for low, _ in ends), max(high for _, high in ends), best.count)


def ratio(one: Ranking, other: Ranking) -> Interval:
    """Welch's interval of the ratio of two schemes' losses, minus one, at their best rates."""
    # A loss of 0 was rounded: fairseq logs three decimals.
    ours, theirs = ([math.log(max(loss(row), 5e-4)) for row in ranking.at_best.values()] for ranking in (one, other))
    logs = contrast([(1, ours), (-1, theirs)])
    return Interval(math.expm1(logs.mean), math.expm1(logs.low), math.expm1(logs.high), logs.count)


def versus(one: Ranking, other: Ranking | None, measure: Measure, digits: str, lower_is_better: bool) -> str:
    """The difference to another scheme in words; empty without another scheme."""
    return in_words(difference(one, other, measure), digits, lower_is_better) if other and other is not one else ""


def best_rate(ranking: Ranking) -> str:
    """The best rate. Notes say whether it is at the edge of the rates tried, and which rates are as good as it."""
    rates = list(ranking.runs)
    notes = ["edge"] if len(rates) > 2 and ranking.best in (rates[0], rates[-1]) else []
    notes += [f"as good: {' '.join(ranking.as_good)}"] if ranking.as_good else []
    return ranking.best + (f" ({', '.join(notes)})" if notes else "")


def table(rows: Sequence[Row]) -> list[Row]:
    """The table of make compare or make deeper: a row for each scheme and depth."""
    columns = accuracies if "diverged" in rows[0] else losses
    ranked = rankings(rows)
    places = {(ranking.scheme, ranking.layers): ranking for ranking in ranked}
    return [
        {"scheme": one.scheme, "layers": one.layers, "best rate": best_rate(one), **columns(one, places)}
        for one in ranked
    ]


def losses(ranking: Ranking, places: dict[tuple[str, str], Ranking]) -> Row:
    runs, base = list(ranking.at_best.values()), places.get((BASE, ranking.layers))
    return {
        "learned": f"{learned(ranking.at_best)} of {len(runs)}",
        "window": " ".join(ranking.window) or "-",
        "bits, valid": with_interval(list(map(loss, runs)), ".3f"),
        "still falling": f"{sum(still_falling(row['valid']) for row in runs)} of {len(runs)}",
        "BLEU, test": with_interval(list(map(score, runs)), ".2f"),
        "bits vs. Admin": versus(ranking, base, loss, "+.3f", True),
        "loss vs. Admin, Welch": in_words(ratio(ranking, base), "+.1%", True) if base and base is not ranking else "",
        "BLEU vs. Admin": versus(ranking, base, score, "+.2f", False),
    }


def accuracies(ranking: Ranking, places: dict[tuple[str, str], Ranking]) -> Row:
    runs = list(ranking.at_best.values())
    row = {"diverged": f"{sum(run['diverged'] for run in runs)} of {len(runs)}"}
    row["accuracy, test"] = with_interval(list(map(accuracy, runs)), ".3f")
    for base in DEEPER_BASES:
        row[f"vs. {TITLES[base]}"] = versus(ranking, places.get((base, ranking.layers)), accuracy, "+.3f", False)
    return row


def by_level(rows: Sequence[Row]) -> dict[str, dict[str, list[Row]]]:
    """The runs of make sensitivity or make warmup, by scheme and optimizer, then by β2 or warm-up."""
    against, title = ("warmup", "warm-up") if "warmup" in rows[0] else ("beta2", "β2")
    panels: dict[str, dict[str, list[Row]]] = {}
    for row in sorted(rows, key=lambda row: row.get("optimizer", "")):
        scheme = TITLES[row["scheme"]] + OPTIMIZERS[row.get("optimizer", "")]
        panels.setdefault(scheme, {}).setdefault(f"{title} {row[against]}", []).append(row)
    return panels


def learning(rows: Sequence[Row]) -> list[Row]:
    """The rates at which a scheme learns with every seed, with a column for each β2 or warm-up."""

    def rates(runs: Sequence[Row]) -> str:
        by_rate = grouped(sorted(runs, key=lambda row: float(row["lr"])), "lr").items()
        return " ".join(rate for (rate,), same in by_rate if {row["verdict"] for row in same} == {"learned"}) or "none"

    return [
        {"scheme": title, **{label: rates(runs) for label, runs in levels.items()}}
        for title, levels in by_level(rows).items()
    ]
