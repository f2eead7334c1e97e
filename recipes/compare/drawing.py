"""What the programs that draw a grid share: how they are called, and how the figure is written."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from recipes.steps.common import replacing


def arguments(description: str) -> argparse.ArgumentParser:
    """The figure to write, and the results: as a grid's cells wrote them, or its runs.csv."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("figure", type=Path)
    parser.add_argument("results", type=Path, nargs="+")
    return parser


def draw(args: argparse.Namespace, drawn: Callable[[], Figure]) -> None:
    """Write the figure as a PNG of few colours, which makes it a third as large; whole or not at all."""
    full = io.BytesIO()
    drawn().savefig(full, format="png", dpi=150)
    with replacing(args.figure) as part:
        Image.open(full).convert("RGB").quantize(128).save(part, format="png", optimize=True)
