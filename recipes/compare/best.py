"""Print each scheme's best learning rate by the runs there are, for those that are still to come.

    python -m recipes.compare.best RUN/*-s1/result.json

prints a word a scheme and depth, as in `admin-18l=1e-3`; which rate is best, recipes/compare/standing.py says.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from recipes.compare.grid_table import read_results
from recipes.compare.standing import standings
from recipes.steps.common import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="+")
    args = parser.parse_args()
    print(*(f"{it.scheme}-{it.layers}l={it.best}" for it in standings(read_results(args.results))))


if __name__ == "__main__":
    run(main)
