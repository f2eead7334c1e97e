"""How the schemes of a comparison stand: each at its own best learning rate, with intervals over the seeds.

    python -m recipes.compare.standing RUN RUN/*/result.json

writes RUN/standing.md and RUN/standing.csv, a row a scheme and depth:

    best rate   by the seeds that every rate was tried with: the one with most that learned; of those the one with the
                lowest mean of the last loss on validation; `edge`: no rate beyond it was tried; `as good`: rates at
                which as many seeds learned, three or more, and whose loss is not shown to be higher
    window      the rates at which every seed learned
    left        the update at which validation fell below the plateau's bound
    bits, BLEU  the outcome, which is the mean of the last four validations, and the score of the test set, which chose
                nothing; of one seed or two, each value
    falling     the runs whose outcome is more than 2 % below the mean of the four validations before
    vs. Admin   the difference to Admin's row, seed by seed: the same batches in the same order. Its interval spans
                those at all rates that are as good, so that no verdict hangs on which of them came out best
    Welch       the ratio of the losses less one, by Welch's interval on their logarithms, which pairs no seeds

Intervals are Student's t at 95 % over the seeds. A difference counts if its interval, from three seeds or more, is on
one side of zero; else none was shown. Many rows are compared at once: one in twenty will count by chance. A run that
diverged counts with the loss beyond which a run has diverged, and with BLEU 0.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from recipes.compare.grid_table import notes, places, read_results, write_csv
from recipes.compare.outcomes import FEWEST, LAST, LEVEL, Interval, interval, outcome, still_falling, told, welch
from recipes.compare.verdict import EXPLODED
from recipes.steps.common import run, write_lines
from recipes.steps.plugin import SCHEMES

BASE = "admin"
NOT_SHOWN = "no difference shown"


def last(result: dict) -> float:
    """A run's last loss on validation, as `loss` bounds it: by it the rate was chosen that further seeds run at."""
    bound, bits = EXPLODED * result["entropy"], result["bits"]
    return min(bits, bound) if bits is not None and math.isfinite(bits) else bound


def loss(result: dict) -> float:
    """A run's outcome, in bits per token; of one that diverged the bound beyond which a run has, and no more of any."""
    bound, bits = EXPLODED * result["entropy"], outcome(result["valid"])
    return min(bits, bound) if result["verdict"] != "diverged" and math.isfinite(bits) else bound


def score(result: dict) -> float:
    """A run's BLEU on the test set."""
    return result["bleu"] or 0.0


def learned(results: list[dict]) -> int:
    return sum(result["verdict"] == "learned" for result in results)


@dataclass(frozen=True)
class Standing:
    """A scheme at one depth: its runs by learning rate, ascending; its best rate, and the rates that are as good."""

    scheme: str
    layers: str
    runs: dict[str, list[dict]]
    best: str
    as_good: list[str]

    @property
    def at_best(self) -> dict[str, dict]:
        """The runs at the best rate, by seed."""
        return by_seed(self.runs[self.best])

    @property
    def window(self) -> list[str]:
        return [rate for rate, results in self.runs.items() if learned(results) == len(results)]


def by_seed(runs: list[dict]) -> dict[str, dict]:
    return {result["seed"]: result for result in runs}


def paired(ours: list[dict], theirs: list[dict], measure: Callable[[dict], float]) -> Interval | None:
    """What a measure of our runs is more than of theirs, over the seeds that both have; None if they share none."""
    one, other = by_seed(ours), by_seed(theirs)
    found = [measure(one[seed]) - measure(other[seed]) for seed in one if seed in other]
    return interval(found) if found else None


def by_loss(runs: list[dict]) -> tuple[float, ...]:
    """By which the rates are ordered, best first: seeds that did not learn, then the mean of the last losses."""
    return -learned(runs), interval(list(map(last, runs))).mean


def seeds_of_all(by_rate: dict[Any, list[dict]]) -> set[str]:
    """The seeds that every rate was tried with."""
    return set.intersection(*({result["seed"] for result in runs} for runs in by_rate.values()))


def with_seeds_of_all(by_rate: dict[str, list[dict]]) -> dict[str, list[dict]]:
    """The runs with such seeds, if there are any: a rate is no better for seeds that another was not tried with."""
    seeds = seeds_of_all(by_rate)
    return {rate: [it for it in runs if not seeds or it["seed"] in seeds] for rate, runs in by_rate.items()}


def no_higher(runs: list[dict], best: list[dict]) -> bool:
    """Whether runs at another rate learned as often as those at the best, and their loss is not shown to be higher.

    Both over the seeds that they share.
    """
    ours, theirs = with_seeds_of_all({"other": runs, "best": best}).values()
    return learned(ours) >= learned(theirs) and judged(paired(ours, theirs, loss), True) in (NOT_SHOWN, "ahead")


def standings(
    results: list[dict],
    order: Callable[[list[dict]], Any] = by_loss,
    as_good: Callable[[list[dict], list[dict]], bool] = no_higher,
) -> list[Standing]:
    """One for each scheme and depth, in the order of appearance.

    Args:
        order: by which the rates of a scheme are ordered, the best one first; of equal ones the lowest is the best.
        as_good: whether runs at another rate, given first, are as good as those at the best.
    """
    found = []
    for (scheme, layers), them in places(results, ["scheme", "layers"]).items():
        by_rate = {rate: runs for (rate,), runs in places(them, ["lr"]).items()}
        by_rate = dict(sorted(by_rate.items(), key=lambda item: float(item[0])))
        tried = with_seeds_of_all(by_rate)
        best = min(tried, key=lambda rate: order(tried[rate]))
        others = [rate for rate, runs in by_rate.items() if rate != best and as_good(runs, by_rate[best])]
        found.append(Standing(scheme, layers, by_rate, best, others))
    return found


def difference(one: Standing, other: Standing, measure: Callable[[dict], float]) -> Interval | None:
    """What a measure of one scheme is more than of the other, at their best rates; None if they share no seed there.

    The interval reaches from the lowest to the highest of those at all pairs of their best rates and others as good.
    """
    best = paired(one.runs[one.best], other.runs[other.best], measure)
    if best is None:
        return None
    pairs = itertools.product((one.best, *one.as_good), (other.best, *other.as_good))
    them = [paired(one.runs[ours], other.runs[theirs], measure) for ours, theirs in pairs]
    found = [it for it in them if it and it.count >= min(best.count, FEWEST)]
    return Interval(best.mean, min(it.low for it in found), max(it.high for it in found), best.count)


def against(one: Standing, other: Standing) -> Interval | None:
    """Welch's interval of one scheme's losses over the other's, less one, at their best rates."""
    ours, theirs = (list(map(loss, it.at_best.values())) for it in (one, other))
    return welch(ours, theirs)


def judged(found: Interval | None, lower_is_better: bool) -> str:
    """What a difference shows: `ahead`, `behind`, or that it shows none."""
    if found is None or found.count < FEWEST:
        return f"fewer than {FEWEST} seeds"
    if found.low <= 0 <= found.high:
        return NOT_SHOWN
    return "ahead" if (found.high < 0) == lower_is_better else "behind"


def shown(found: Interval | None, digits: str, lower_is_better: bool) -> str:
    said = judged(found, lower_is_better)
    return f"{said}: {found:{digits}}" if found and found.count >= FEWEST else said


def rate(best: str, tried: list[str], as_good: Sequence[str] = ()) -> str:
    """A rate, whether it is at the edge of those that were tried, ascending, and those that are as good."""
    edge = ["edge"] if len(tried) > 2 and best in (tried[0], tried[-1]) else []
    noted = edge + ([f"as good: {' '.join(as_good)}"] if as_good else [])
    return best + (f" ({', '.join(noted)})" if noted else "")


def row(standing: Standing, tried: Standing, base: Standing | None) -> dict[str, str]:
    """A row of the table; `tried` has the rates, `base` is what it is compared with, if that is another."""
    at_best = list(standing.at_best.values())
    left = [result["left"] for result in at_best if result["left"] is not None]
    return {
        "scheme": standing.scheme,
        "layers": standing.layers,
        "best rate": rate(standing.best, list(tried.runs), standing.as_good),
        "learned": f"{learned(at_best)} of {len(at_best)}",
        "window": " ".join(tried.window) or "-",
        "left the plateau at": told(left, ".0f") if len(left) == len(at_best) else "-",
        "bits, valid": told(list(map(loss, at_best)), ".3f"),
        "still falling": f"{sum(still_falling(result['valid']) for result in at_best)} of {len(at_best)}",
        "BLEU, test": told(list(map(score, at_best)), ".2f"),
        "bits vs. Admin": shown(difference(standing, base, loss), "+.3f", True) if base else "",
        "loss vs. Admin, Welch": shown(against(standing, base), "+.1%", True) if base else "",
        "BLEU vs. Admin": shown(difference(standing, base, score), "+.2f", False) if base else "",
    }


def searched(results: list[dict]) -> str:
    """Which seed the rates were tried on, if not on every one."""
    tried = seeds_of_all(places(results, ["lr"]))
    alone = len(tried) == 1 and len({result["seed"] for result in results}) > 1
    return f" (the rates were tried on seed {tried.pop()})" if alone else ""


def table(results: list[dict], tried: list[dict] | None = None) -> list[dict[str, str]]:
    """The rows.

    Args:
        tried: other runs, which showed each scheme's window and best rate; default: the results themselves.
    """
    them = standings(results)
    bases = {standing.layers: standing for standing in them if standing.scheme == BASE}
    search = {(it.scheme, it.layers): it for it in (standings(tried) if tried else them)}
    return [row(it, search[it.scheme, it.layers], bases.get(it.layers) if it.scheme != BASE else None) for it in them]


def markdown(
    rows: list[dict[str, str]], title: Callable[[str], str] = lambda scheme: SCHEMES[scheme].title
) -> list[str]:
    """The table as Markdown, schemes by their titles."""
    titled = [{**it, "scheme": title(it["scheme"])} for it in rows]
    return tabulate(titled, headers="keys", tablefmt="github", disable_numparse=True).splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--tried", type=Path, help="runs.csv of the short runs that the rates were tried with")
    parser.add_argument("--updates", type=int, help="how long those were")
    args = parser.parse_args()
    results = read_results(args.results)
    tried = read_results([args.tried]) if args.tried else None
    rows = table(results, tried)
    write_csv(args.folder / "standing.csv", rows)
    lines = markdown(rows)
    rates = sorted({result["lr"] for result in tried or results}, key=float)
    on = searched(results)
    if tried:
        seeds = ", ".join(sorted({result["seed"] for result in tried}))
        on = f" (the rates, and so the window, were tried in runs of {args.updates} updates on seed {seeds})"
    rule = (
        f"A loss is the mean of the last {LAST} validations. "
        f"Each scheme at its best of the rates {', '.join(rates)}{on}; brackets: Student's t over the "
        f"seeds, {LEVEL:.0%}. "
        f"{len(rows)} rows are compared at once. What the columns are: recipes/compare/standing.py."
    )
    write_lines(args.folder / "standing.md", [*lines, *notes(results), rule])


if __name__ == "__main__":
    run(main)
