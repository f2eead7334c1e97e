"""The claims of docs/protocol.md, from the rows of its runs.

    python -m recipes.figures.protocol docs/rows/protocol.csv -o protocol.png

This prints each comparison whose runs are complete, with its power given the spread of the rows, and draws every run
and the means of the groups. The pilot runs, by which the rates were chosen, do not count.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
from scipy import stats

from recipes.compare.intervals import LEVEL, contrast
from recipes.compare.outcome import loss
from recipes.compare.rows import TITLES, Row, grouped, read_results
from recipes.figures.drawing import draw_curves, save
from recipes.steps.common import run

SEEDS = tuple("456789")
MARGIN = 0.05
"""Two methods are equivalent if they differ by fewer bits."""
DRAWS = 40_000
MISSING = "not all of its runs are there"


def first(pre_ln: Sequence[float], admin: Sequence[float]) -> str:
    """Pre-LN - Admin: is there a difference (Welch)? Is it small (two one-sided tests)?"""
    whole, narrow = (contrast([(1, pre_ln), (-1, admin)], level) for level in (LEVEL, 0.9))
    claims = ["Admin ends ahead"] if whole.low > 0 else ["Admin ends behind"] if whole.high < 0 else []
    claims += [f"equivalent within {MARGIN} bits"] if -MARGIN < narrow.low and narrow.high < MARGIN else []
    return f"{' and '.join(claims) or 'not decided'}: {whole:+.3f} bits; 90 % interval: {narrow:+.3f}"


def second(deep: Sequence[Sequence[float]], shallow: Sequence[Sequence[float]]) -> str:
    """Does the difference depend on depth? Each argument has the losses of Pre-LN, then those of Admin."""
    interaction = contrast([*zip((1, -1), deep), *zip((-1, 1), shallow)])
    claim = "grows with depth" if interaction.low > 0 else "shrinks with depth" if interaction.high < 0 else "not shown"
    return f"{claim}: {interaction:+.3f} bits"


def power(deviations: Sequence[float], difference: float) -> tuple[float, float]:
    """The shares of random draws that show a difference, and that show equivalence. Outcomes are drawn as normal.

    Args:
        deviations: standard deviations of the outcomes of Pre-LN and Admin.
        difference: difference of their means, in bits.
    """
    generator = np.random.default_rng(1)
    pre_ln, admin = (generator.normal(0, deviation, (DRAWS, len(SEEDS))) for deviation in deviations)
    tests = stats.ttest_ind(pre_ln + difference, admin, axis=1, equal_var=False)
    narrow = tests.confidence_interval(0.9)
    equivalent = (narrow.low > -MARGIN) & (narrow.high < MARGIN)
    return float((tests.pvalue < 1 - LEVEL).mean()), float(equivalent.mean())


def group(runs: Sequence[Row]) -> str:
    """The mean of a group, and the runs in it that did not learn."""
    failed = [f"; seed {row['seed']} {row['verdict']}" for row in runs if row["verdict"] != "learned"]
    bits, bleu = list(map(loss, runs)), fmean(row["bleu"] or 0 for row in runs)
    return f"{fmean(bits):.3f} bits, standard deviation {stdev(bits):.3f}, BLEU {bleu:.2f}{''.join(failed)}"


def claims(rows: Sequence[Row]) -> list[str]:
    """A line for each claim. If a run has two rows, the later row counts."""
    once = {(row["layers"], row["scheme"], row["seed"]): row for row in rows}.values()
    groups = {place: runs for place, runs in grouped(once, "layers", "scheme").items() if len(runs) == len(SEEDS)}
    lines = [f"{TITLES[scheme]}, {layers}L-{layers}L: {group(runs)}" for (layers, scheme), runs in groups.items()]
    both = {}
    for depth in ("18", "6"):
        if (depth, "pre-ln") in groups and (depth, "admin") in groups:
            both[depth] = [list(map(loss, groups[depth, scheme])) for scheme in ("pre-ln", "admin")]
    lines.append(f"Pre-LN - Admin at 18L-18L: {first(*both['18']) if '18' in both else MISSING}")
    lines.append(f"The difference of that to 6L-6L: {second(both['18'], both['6']) if len(both) > 1 else MISSING}")
    for depth, outcomes in both.items():
        deviations = list(map(stdev, outcomes))
        seen = ", ".join(f"{power(deviations, bits)[0]:.2f} for {bits}" for bits in (0.05, 0.03, 0.02))
        lines.append(f"Power at {depth}L-{depth}L: {seen} bits; for equivalence {power(deviations, 0)[1]:.2f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("-o", "--figure", type=Path)
    args = parser.parse_args()
    rows = [row for row in read_results([args.rows]) if row["seed"] in SEEDS]
    print("\n".join(claims(rows)))
    if args.figure and rows:
        save(draw_curves(rows), args.figure)


if __name__ == "__main__":
    run(main)
