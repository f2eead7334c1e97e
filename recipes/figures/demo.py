"""The first figure of README.md: the loss on validation against updates in `make demo`."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from recipes.compare.rows import TITLES
from recipes.figures.drawing import ALWAYS, BITS, MARKERS, subplots
from recipes.steps.logs import from_cell

APART = 1.4
"""Bits from one label to the next, at least."""


def draw(rows: Sequence[dict[str, str]]) -> Figure:
    """A row of results.csv a method; a curve is labelled at its end, or above that, where labels would overlap."""
    figure, ((axes,),) = subplots(1, 1, (8, 4))
    curves = {row["method"]: from_cell(row["valid"]) for row in rows}
    bleu = {row["method"]: float(row["score"]) for row in rows}
    place = -APART
    for method, curve in sorted(curves.items(), key=lambda item: item[1][max(item[1])]):
        end, colour = curve[max(curve)], ALWAYS[method]
        axes.plot(*zip(*curve.items()), marker=MARKERS[method], markersize=4, color=colour, clip_on=False)
        text, place = f"{TITLES[method]}\n{end:.2f} bits, BLEU {bleu[method]:.1f}", max(end, place + APART)
        axes.text(1.02, place, text, transform=axes.get_yaxis_transform(), color=colour, va="center", fontweight="bold")
    axes.set(xlabel="updates", ylabel=BITS, xlim=(0, max(map(max, curves.values()))), ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    return figure
