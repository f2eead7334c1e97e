"""What the programs that draw a grid share: how they are called, and how the figure is written."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

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


def draw(args: argparse.Namespace, drawn: Callable[[], Figure]) -> None:
    """Write the figure as a PNG, whole or not at all."""
    figure = drawn()
    with replacing(args.figure) as part:
        figure.savefig(part, format="png", dpi=150)
        few_colours(part)
