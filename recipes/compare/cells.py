"""What the programs of a cell share: how they are called, what they say of the grid, and how a cell ends.

How far a grid is: n of N cells, and the time left at the pace of the make that is running. Cells run side by side and a
make may go on where another stopped, so what counts is the cells that this one finished.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

from recipes.steps.common import read_object, write_lines
from recipes.steps.progress import duration
from recipes.steps.results import commit, hardware


def parsed(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[str]]:
    """What was given for the program itself, and after -- for fairseq's. `parser` gets what every cell's has."""
    parser.add_argument("cell", type=Path, help="the run's folder; its name says what it is")
    parser.add_argument("axes", nargs="*", metavar="NAME=VALUE", help="where in the grid it is, for its result")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1, help="cells running side by side, spread over the GPUs")
    parser.add_argument("--cells", nargs="*", default=[], help="the names of all cells of the grid")
    parser.add_argument("--since", type=float, help="when this make began, in seconds since 1970")
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    return parser.parse_args(arguments[:split]), arguments[split + 1 :]


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


def stopped(args: argparse.Namespace) -> bool:
    """Whether the cell's training stopped itself because it had diverged, as train_cell wrote down."""
    expected = "what its training left. Remove this folder, and make it again"
    return read_object(args.cell / "trained.json", {"stopped": bool}, expected)["stopped"]


def ended(args: argparse.Namespace, found: dict, said: str) -> None:
    """Write the cell's result, with where in the grid it is; remove its checkpoints; say how it came out."""
    row = {**dict(axis.split("=", 1) for axis in args.axes), **found, "hardware": hardware(), "commit": commit()}
    write_lines(args.cell / "result.json", [json.dumps(row)])
    shutil.rmtree(args.cell / "checkpoints", ignore_errors=True)
    print(f"{args.cell.name}: {said}{told(args)}", flush=True)
