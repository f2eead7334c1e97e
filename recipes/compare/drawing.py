"""What the programs that draw a grid share: how they are called, and how the figure is written."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from recipes.compare.verdict import PLATEAU
from recipes.steps.common import replacing

if TYPE_CHECKING:
    from fairseq_admin.analysis.figure import few_colours
else:
    from recipes.plugin.analysis.figure import few_colours


def arguments(description: str) -> argparse.ArgumentParser:
    """The figure to write, and the results: as a grid's cells wrote them, or its runs.csv."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("figure", type=Path)
    parser.add_argument("results", type=Path, nargs="+")
    return parser


def loss_axis(panels: Iterable[Axes], losses: list[float], entropy: float, most: float) -> float:
    """Give panels a logarithmic axis of losses, which shows how far apart the low ones are; returns where it ends.

    It begins a little below the lowest and ends a little above the highest, or the plateau's bound.

    Args:
        losses: those that are shown, above 0.
        most: where it ends at the latest, in entropies.
    """
    bound = PLATEAU * entropy
    low, top = 0.95 * min([bound, *losses]), 1.05 * min(max([bound, *losses]), most * entropy)
    for axes in panels:
        axes.set(yscale="log", ylim=(low, top))
        axes.yaxis.set_major_locator(LogLocator(subs=range(1, 10) if top < 10 * low else (1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
    return top


def draw(args: argparse.Namespace, drawn: Callable[[], Figure]) -> None:
    """Write the figure as a PNG, whole or not at all.

    Raises:
        ValueError: its name is another file's; it may be one of the results.
    """
    if args.figure.suffix != ".png":
        raise ValueError(f"{args.figure}: expected the name of the figure, NAME.png, before the results. Give one.")
    figure = drawn()
    with replacing(args.figure) as part:
        figure.savefig(part, format="png", dpi=130)
        few_colours(part)
