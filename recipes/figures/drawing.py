"""What the figures of losses share: how they are written, and the axis of losses."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from fairseq_admin.analysis.figure import ALWAYS, COLOURS, few_colours
from recipes.compare.outcome import EXPLODED, PLATEAU
from recipes.compare.rows import TITLES, Row
from recipes.steps.common import replacing

MARKERS = dict(zip(ALWAYS, "osD"))
STYLES = ("-", "--", ":", "-.")
BITS = "bits per token, validation"


def looks(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """How the schemes of some rows are drawn, in the order of TITLES."""
    there = {row["scheme"] for row in rows}
    schemes = [name for name in TITLES if name in there]
    drawn = zip((name for name in schemes if name not in ALWAYS), itertools.product(STYLES, COLOURS))
    every = {name: ("-", colour) for name, colour in ALWAYS.items()} | dict(drawn)
    return {name: dict(zip(("linestyle", "color"), every[name])) for name in schemes}


def subplots(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Figure, Any]:
    """A figure and its panels. Shape (rows, columns)."""
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def loss_axes(panels: Iterable[Axes], losses: Iterable[float], entropy: float) -> None:
    """Give panels a logarithmic axis of losses, which shows how far apart the low ones are, with its landmarks.

    It begins a little below the lowest and ends a little above the highest, or the plateau's bound.

    Args:
        losses: those that are shown; one that has exploded says no more than that.
    """
    bound = PLATEAU * entropy
    known = [bits for bits in losses if 0 < bits]
    low, top = 0.95 * min([bound, *known]), 1.05 * min(max([bound, *known]), EXPLODED * entropy)
    landmarks = (entropy, ":", "entropy of a token"), (bound, "--", f"plateau ({PLATEAU} of the entropy)")
    for axes in panels:
        for level, style, label in landmarks:
            if level < top:
                axes.axhline(level, color="grey", linewidth=0.8, linestyle=style, label=label)
        axes.set(yscale="log", ylim=(low, top))
        axes.yaxis.set_major_locator(LogLocator(subs=range(1, 10) if top < 10 * low else (1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")


def save(figure: Figure, path: Path, dpi: int = 130) -> None:
    """Write a PNG, whole or not at all."""
    with replacing(path) as part:
        figure.savefig(part, format="png", dpi=dpi)
        few_colours(part)
