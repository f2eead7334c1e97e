"""The accuracy of every scheme of `make deeper` at its best rate, a panel for each number of new layers."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipes.compare.intervals import LEVEL, contrast
from recipes.compare.ranking import Ranking
from recipes.compare.rows import TITLES, Row
from recipes.deeper.summary import accuracy, at_best_rates
from recipes.figures.drawing import ALWAYS, subplots

# Of Okabe and Ito's colours, after those that a scheme always has.
COLOURS = {**ALWAYS, "none": "grey", "dt-fixup": "black", "deepnorm": "#E69F00", "rezero": "#CC79A7"}
LIMITS = 0.4, 1.0
"""Of the accuracies that are shown; what is beyond is cut off."""
GUESS = 0.5


def panel(axes: Axes, ranked: Sequence[Ranking]) -> None:
    """The schemes at one depth, next to each other: mean, interval and seeds."""
    for place, it in enumerate(ranked):
        seeds, colour = list(map(accuracy, it.at_best.values())), COLOURS.get(it.scheme)
        found = contrast([(1, seeds)])
        if found.count > 1:
            axes.vlines(place, found.low, found.high, color=colour, linewidth=1)
        axes.plot([place], [found.mean], "o", color=colour, markersize=7)
        axes.plot([place + 0.25] * len(seeds), seeds, ".", color=colour, markersize=4, alpha=0.6, clip_on=False)
    axes.axhline(GUESS, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(ranked)), [TITLES[it.scheme] for it in ranked], rotation=90)
    axes.set(xlim=(-0.6, len(ranked) - 0.4), ylim=LIMITS)
    axes.spines[["top", "right"]].set_visible(False)


def draw(rows: Sequence[Row]) -> Figure:
    """A panel for every depth, and one for the head alone."""
    ranked = at_best_rates(rows)
    depths = sorted({it.layers for it in ranked}, key=int)
    panels = {depth: [it for it in ranked if it.layers == depth] for depth in depths}
    figure, ((*drawn,),) = subplots(
        1, len(depths), (7.5, 4), sharey=True, width_ratios=[len(them) for them in panels.values()]
    )
    for axes, (depth, them) in zip(drawn, panels.items()):
        panel(axes, them)
        axes.set_title("" if int(depth) == 0 else f"{depth} new layers", fontsize="medium")
    drawn[-1].text(
        1, GUESS, " chance", transform=drawn[-1].get_yaxis_transform(), color="grey", va="center", fontsize="small"
    )
    drawn[0].set_ylabel("accuracy, test")
    figure.suptitle(
        f"large: mean of the seeds (small) at the best rate; bars: {LEVEL:.0%} interval, cut at the axes",
        fontsize="medium", x=0.01, ha="left",
    )  # fmt: skip
    return figure
