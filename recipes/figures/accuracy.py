"""The accuracy of every scheme of `make deeper` at its best rate, by the number of new layers."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from matplotlib.figure import Figure

from recipes.compare.rows import TITLES, Row, values
from recipes.deeper.summary import accuracy, at_best_rates
from recipes.figures.drawing import looks, subplots

GUESS = 0.5


def draw(rows: Sequence[Row]) -> Figure:
    """The schemes next to each other at each depth: the mean, and the seeds to its right."""
    ranked, depths = at_best_rates(rows), values(rows, "layers", int)
    schemes = looks(rows)
    figure, ((axes,),) = subplots(1, 1, (7.5, 4))
    for it in ranked:
        seeds, look = list(map(accuracy, it.at_best.values())), {"color": schemes[it.scheme]["color"], "clip_on": False}
        place = depths.index(it.layers) + ([*schemes].index(it.scheme) - len(schemes) / 2) / (len(schemes) + 2)
        label = TITLES[it.scheme] if it.layers in ("0", depths[-1]) else ""
        axes.plot([place], [fmean(seeds)], "o", markersize=7, label=label, **look)
        axes.plot([place + 0.04] * len(seeds), seeds, ".", markersize=4, alpha=0.6, **look)
    axes.axhline(GUESS, color="grey", linewidth=0.8, linestyle=":", label="chance")
    axes.set_xticks(range(len(depths)), ["" if depth == "0" else f"{depth} new layers" for depth in depths])
    axes.set(ylabel="accuracy, test", title="large: mean of the seeds (small) at the best rate")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    return figure
