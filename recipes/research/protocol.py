"""The claims of docs/protocol.md and docs/protocol-omega.md, from the rows of their runs.

    python -m recipes.research.protocol docs/rows/protocol.csv -o protocol.png
    python -m recipes.research.protocol docs/rows/protocol.csv docs/rows/protocol-omega.csv -o protocol-omega.png

The first command prints the groups of the first protocol, each comparison whose runs are complete, and its power given
the spread of the rows. The second prints the bridge, the groups and the comparisons of rules. At 18L-18L two of the
three groups are the first protocol's if the bridge holds, and are in the new rows otherwise. Both print the pilots in
the last file, which do not count, and draw every other run.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, linear_regression, stdev

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from recipes.research.drawing import draw_losses, save
from recipes.research.intervals import LEVEL, NOT_SHOWN, Interval, contrast, judged
from recipes.research.outcome import bounded, loss
from recipes.research.rows import TITLES, Row, read_results, sizes
from recipes.steps.common import run
from recipes.steps.summary import titled

SEEDS = {"18": tuple("456789"), "6": tuple("456789"), "60-12": tuple("456")}
"""The seeds at each depth."""
DEPTHS = ("18", "60-12")
"""The depths at which rules of omega are compared."""
METHODS = ("constant", "reference", "pre-ln")
"""Admin by its rule of omega, and Pre-LN."""
MARGIN = 0.05
"""Two methods are equivalent if they differ by fewer bits."""
DRAWS = 40_000
EARLY = (750, 1000, 1250)
BRIDGE = 0.02
"""Runs of the first protocol count if the same runs at the new commit differ by at most this many bits."""
BRIDGE_SEEDS = ("4", "5")
PILOT = "1"
"""The seed of the pilots, which choose the rates."""
MISSING = "not all of its runs are there"
Place = tuple[str, str]
"""Depth and method."""
Groups = dict[Place, dict[str, Row]]
"""Runs by depth and method, then by seed."""


def groups_of(rows: Sequence[Row]) -> Groups:
    """The runs that count. A row may be there twice.

    Raises:
        ValueError: a seed was run twice, or runs of one group have different rates or numbers of updates.
    """
    groups: Groups = {}
    for row in rows:
        method = row.get("rule") or {"admin": "reference"}.get(row["scheme"], row["scheme"])
        if method in METHODS and row["seed"] in SEEDS.get(row["layers"], ()):
            known = groups.setdefault((row["layers"], method), {}).setdefault(row["seed"], row)
            if known != row:
                place = f"{method} at {sizes(row['layers'])}"
                raise ValueError(f"{place}: found two runs with seed {row['seed']}; expected one: no seed is replaced.")
    for (layers, method), runs in groups.items():
        rates = {f"rate {row['lr']}" for row in runs.values()}
        ends = {f"{max(row['valid'])} updates" for row in runs.values() if row["verdict"] != "diverged"}
        if len(rates) > 1 or len(ends) > 1:
            ways = ", ".join(sorted(rates | ends))
            raise ValueError(f"{method} at {sizes(layers)}: found runs with {ways}; expected one rate and length.")
    return groups


def complete(groups: Groups, *places: Place) -> bool:
    return all(len(groups.get(place, {})) == len(SEEDS[place[0]]) for place in places)


def difference(
    groups: Groups, weights: Mapping[Place, int], measure: Callable[[Row], float] = loss, level: float = LEVEL
) -> Interval | None:
    """Welch's interval of Σ weight x mean of a measure; None if a run is missing."""
    if not complete(groups, *weights):
        return None
    return contrast([(weight, list(map(measure, groups[place].values()))) for place, weight in weights.items()], level)


# -- docs/protocol.md --------------------------------------------------------------------------------------------------


def name(row: Row) -> str:
    """The method and the depth of a run."""
    return f"{titled(TITLES[row['scheme']], row.get('rule') or '')}, {sizes(row['layers'])}"


def pilots(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each pilot."""
    for row in rows:
        if row["seed"] == PILOT:
            yield f"Pilot of {name(row)}, {row['lr']}: {loss(row):.3f} bits after {max(row['valid']):,} updates"


def group(runs: Sequence[Row]) -> str:
    """The mean of a group, and the runs in it that did not learn."""
    failed = [f"; seed {row['seed']} {row['verdict']}" for row in runs if row["verdict"] != "learned"]
    bits, bleu = list(map(loss, runs)), fmean(row["bleu"] or 0 for row in runs)
    return f"{fmean(bits):.3f} bits, standard deviation {stdev(bits):.3f}, BLEU {bleu:.2f}{''.join(failed)}"


def described(groups: Groups, depths: Sequence[str]) -> Iterator[str]:
    """A line for each complete group at some depths."""
    for place, runs in groups.items():
        if place[0] in depths and complete(groups, place):
            rows = list(runs.values())
            yield f"{name(rows[0])}: {group(rows)}"


def power(deviations: Sequence[float], difference: float) -> tuple[float, float]:
    """The shares of random draws that show a difference, and that show equivalence. Outcomes are drawn as normal.

    Args:
        deviations: standard deviations of the outcomes of Pre-LN and Admin.
        difference: difference of their means, in bits.
    """
    generator = np.random.default_rng(1)
    pre_ln, admin = (generator.normal(0, deviation, (DRAWS, len(SEEDS["18"]))) for deviation in deviations)
    tests = stats.ttest_ind(pre_ln + difference, admin, axis=1, equal_var=False)
    narrow = tests.confidence_interval(0.9)
    equivalent = (narrow.low > -MARGIN) & (narrow.high < MARGIN)
    return float((tests.pvalue < 1 - LEVEL).mean()), float(equivalent.mean())


def claims(groups: Groups) -> Iterator[str]:
    """A line for each group and claim: is there a difference (Welch), is it small (two one-sided tests), does it depend
    on depth?"""
    yield from described(groups, tuple(SEEDS))
    deep = {("18", "pre-ln"): 1, ("18", "reference"): -1}
    shallow = {("6", "pre-ln"): -1, ("6", "reference"): 1}
    whole, narrow = difference(groups, deep), difference(groups, deep, level=0.9)
    verdict = MISSING
    if whole and narrow:
        shown = ["Admin ends ahead"] if whole.low > 0 else ["Admin ends behind"] if whole.high < 0 else []
        shown += [f"equivalent within {MARGIN} bits"] if -MARGIN < narrow.low and narrow.high < MARGIN else []
        verdict = f"{' and '.join(shown) or 'not decided'}: {whole:+.3f} bits; 90 % interval: {narrow:+.3f}"
    yield f"Pre-LN - Admin at 18L-18L: {verdict}"
    verdict = MISSING
    if interaction := difference(groups, deep | shallow):
        grows = "grows with depth" if interaction.low > 0 else "shrinks with depth" if interaction.high < 0 else ""
        verdict = f"{grows or 'not shown'}: {interaction:+.3f} bits"
    yield f"The difference of that to 6L-6L: {verdict}"
    for layers, pair in (("18", deep), ("6", shallow)):
        if complete(groups, *pair):
            deviations = [stdev(map(loss, groups[place].values())) for place in pair]
            seen = ", ".join(f"{power(deviations, bits)[0]:.2f} for {bits}" for bits in (0.05, 0.03, 0.02))
            yield f"Power at {sizes(layers)}: {seen} bits; for equivalence {power(deviations, 0)[1]:.2f}"


# -- docs/protocol-omega.md --------------------------------------------------------------------------------------------


def early_loss(row: Row) -> float:
    """The mean of the validations at EARLY, each at most 1.5 H, as after a divergence."""
    return fmean(bounded(row, row["valid"].get(update)) for update in EARLY)


def claims_of_rules(old: Groups, new: Groups) -> Iterator[str]:
    """A line for the bridge, each group, and each comparison in the protocol's order, up to the first not shown.

    Args:
        old: runs of the first protocol.
        new: runs of the protocol on omega.
    """
    before, again = (groups.get(("18", "reference"), {}) for groups in (old, new))
    holds, verdict = False, MISSING
    if all(seed in before and seed in again for seed in BRIDGE_SEEDS):
        # Losses have at most four digits, so the rest of the difference is rounding.
        apart = max(round(abs(loss(again[seed]) - loss(before[seed])), 6) for seed in BRIDGE_SEEDS)
        holds = apart <= BRIDGE
        verdict = f"up to {apart:.3f} bits, {'it holds' if holds else 'it fails'}"
    yield f"Bridge: {verdict}"
    at_18 = {**new, **old} if holds else new
    yield from described(at_18, DEPTHS)
    for layers, groups in zip(DEPTHS, (at_18, new)):
        for method in METHODS[1:]:
            interval = difference(groups, {(layers, "constant"): 1, (layers, method): -1})
            verdict = f"{judged(interval, True)}: {interval:+.3f} bits" if interval else MISSING
            yield f"constant - {method} at {sizes(layers)}: {verdict}"
            if verdict.startswith((NOT_SHOWN, MISSING)):
                break
    weights = {("18", "constant"): 1, ("18", "reference"): -1}
    early, end = (difference(at_18, weights, measure) for measure in (early_loss, loss))
    if early and end:
        verdict = "shown" if early.high < 0 < end.low else NOT_SHOWN
        yield f"Begins ahead, ends behind: {verdict}; updates 750 to 1,250: {early:+.3f} bits"


def exploratory(groups: Groups) -> Iterator[str]:
    """Lines that no protocol planned, at 18L-18L: the best validation, the speed, and the course of the end."""
    ends = {}
    for method in METHODS:
        runs = list(groups.get(("18", method), {}).values())
        if not complete(groups, ("18", method)):
            return
        best = [min(row["valid"].values()) for row in runs]
        reached = fmean(min(update for update, bits in row["valid"].items() if bits <= 3) for row in runs)
        rise = fmean(loss(row) for row in runs) - fmean(best)
        yield (
            f"Exploratory, {name(runs[0])}: best validation {fmean(best):.3f} ({stdev(best):.3f}), 3.0 bits after "
            f"{reached:,.0f} updates, end {rise:.3f} above the best"
        )
        last = sorted(runs[0]["valid"])[-4:]
        ends[method] = linear_regression(last, [fmean(row["valid"][update] for row in runs) for update in last])
    one, other = ends["constant"], ends["pre-ln"]
    crossing = (other.intercept - one.intercept) / (one.slope - other.slope)
    yield f"Exploratory: lines through the last four validations of constant and Pre-LN meet at {crossing:,.0f}"


def draw(groups: Groups, depths: Sequence[str]) -> Figure:
    """The losses of every run, in a panel for each depth."""
    lines = []
    for place in (place for layers in depths for place in groups if place[0] == layers):
        rows = list(groups[place].values())
        label = titled(TITLES[rows[0]["scheme"]], rows[0].get("rule") or "")
        lines.append((f"{sizes(place[0])} (thin: seeds, thick: mean)", label, rows))
    return draw_losses(lines, lines[0][2][0]["entropy"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("old", type=Path, help="rows of docs/protocol.md")
    parser.add_argument("new", type=Path, nargs="?", help="rows of docs/protocol-omega.md")
    parser.add_argument("-o", "--figure", type=Path)
    args = parser.parse_args()
    rows = read_results([args.old])
    old, new = groups_of(rows), {}
    lines = claims(old)
    if args.new:
        rows = read_results([args.new])
        new = groups_of(rows)
        lines = itertools.chain(claims_of_rules(old, new), exploratory({**new, **old}))
    print(*lines, *pilots(rows), sep="\n")
    if args.figure:
        save(draw({**new, **old}, DEPTHS if args.new else ("6", "18")), args.figure)


if __name__ == "__main__":
    run(main)
