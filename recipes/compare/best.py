"""Which learning rate the seeds that are still to come run at: each scheme's best with the first seed.

    python -m recipes.compare.best RUN/best.txt RUN/*-s1/result.json

writes a line a scheme and depth, its cells' name without the seed, as in `admin-18l-lr1e-3`. Which rate is best,
recipes/compare/standing.py says.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from recipes.compare.grid_table import read_results
from recipes.compare.standing import Standing, standings
from recipes.steps.common import run, write_lines


def choose(stand: Callable[[list[Path]], list[Standing]]) -> None:
    """The program, for any grid.

    Args:
        stand: from the results' files to how each scheme stands.
    """
    parser = argparse.ArgumentParser(description="Write each scheme's best learning rate.")
    parser.add_argument("best", type=Path)
    parser.add_argument("results", type=Path, nargs="+")
    args = parser.parse_args()
    write_lines(args.best, [f"{it.scheme}-{it.layers}l-lr{it.best}" for it in stand(args.results)])


if __name__ == "__main__":
    run(lambda: choose(lambda paths: standings(read_results(paths))))
