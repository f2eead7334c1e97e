"""The validation losses of a comparison: each scheme at its best learning rate and at those that are as good.

A panel a depth, a colour a scheme; thin lines are seeds, thick ones their mean, or the seeds if they are few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipes.compare.intervals import FEWEST
from recipes.compare.ranking import rankings
from recipes.compare.rows import TITLES, Row, values
from recipes.figures.drawing import BITS, looks, loss_axes, subplots

AS_GOOD = (0, (1, 1))
"""The dashes of a rate that is as good as the best."""


def mean_curve(curves: Sequence[dict[int, float]]) -> dict[int, float]:
    """The mean where every curve still has a finite value."""
    shared = sorted(set.intersection(*map(set, curves)))
    means = {update: fmean(curve[update] for curve in curves) for update in shared}
    return {update: bits for update, bits in means.items() if math.isfinite(bits)}


def draw_runs(axes: Axes, runs: Sequence[Row], label: str, **look: Any) -> None:
    """The runs of a scheme at a rate."""
    curves = [row["valid"] for row in runs]
    for row in runs:
        axes.plot(*zip(*row["valid"].items()), linewidth=0.6, alpha=0.5, **look)
        if row["verdict"] == "diverged":
            axes.plot(row["update"], 0.98, "x", color=look["color"], transform=axes.get_xaxis_transform())
    for thick in curves if len(curves) < FEWEST else [mean_curve(curves)]:
        axes.plot(list(thick), list(thick.values()), linewidth=1.6, label=label, **look)
        label = ""


def draw(rows: Sequence[Row]) -> Figure:
    drawn, depths = looks(rows), values(rows, "layers", int)
    figure, ((*panels,),) = subplots(1, len(depths), (4.2 * len(depths) + 2.6, 4.6), sharey=True)
    losses = []
    for it in sorted(rankings(rows), key=lambda it: [*drawn].index(it.scheme)):
        for rate in (it.best, *it.as_good):
            runs = list(it.runs[rate].values())
            label = f"{TITLES[it.scheme]}, {rate}{' (one seed)' if len(runs) == 1 else ''}"
            look = drawn[it.scheme] | ({} if rate == it.best else {"linestyle": AS_GOOD})
            draw_runs(panels[depths.index(it.layers)], runs, label, **look)
            losses += [bits for row in runs for bits in row["valid"].values() if bits < math.inf]
    loss_axes(panels, losses, rows[0]["entropy"])
    for axes, depth in zip(panels, depths):
        axes.set(title=f"{depth}L-{depth}L (thin: seeds, thick: mean of three or more)", xlabel="updates")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False, fontsize="small")
    panels[0].set_ylabel(BITS)
    return figure
