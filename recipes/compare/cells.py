"""How far a grid is: n of N cells, and the time left at the pace of the make that is running.

Cells run side by side and a make may go on where another stopped, so what counts is the cells that this one finished.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from recipes.steps.progress import duration


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cells", nargs="*", default=[], help="the names of all cells of the grid")
    parser.add_argument("--since", type=float, help="when this make began, in seconds since 1970")


def how_far(grid: Path, cells: list[str], since: float | None, now: float) -> str:
    """As in "; 7 of 36 cells done, 12 min 30 s left"; empty without cells.

    Args:
        grid: the folder of all cells, which may hold those of other grids too.
        cells: the names of this one's.
        since: when this make began; None: not known, and then no time is told.
        now: the time.
    """
    if not cells:
        return ""
    results = [grid / cell / "result.json" for cell in cells]
    ended = [result.stat().st_mtime for result in results if result.exists()]
    here = sum(end >= since for end in ended) if since else 0
    text = f"; {len(ended)} of {len(cells)} cells done"
    if since and here and len(ended) < len(cells):
        text += f", {duration((now - since) / here * (len(cells) - len(ended)))} left"
    return text


def told(args: argparse.Namespace) -> str:
    """The same, by the options of a cell's program."""
    return how_far(args.cell.parent, args.cells, args.since, time.time())
