"""The kinds of grids, and the program that makes one run: python -m recipes.grid.front TARGET RUN NAME=VALUE ..."""

from __future__ import annotations

import sys

from recipes import recipe
from recipes.grid.deeper import Deeper
from recipes.grid.grids import Axes, Grid, Warmup
from recipes.recipe import Recipe
from recipes.steps.common import run


def of(recipe: Recipe) -> Grid:
    return {"Warmup": Warmup, "Deeper": Deeper}.get(recipe.file.kind, Grid)(recipe)


def main() -> None:
    """Make one run."""
    target, name, *words = sys.argv[1:]
    grid = of(recipe.read(target, dict(word.split("=", 1) for word in words)))
    points: list[Axes] = [{}, *grid.points()]
    grid.run(next(axes for axes in points if grid.name(axes) == name)).work()


if __name__ == "__main__":
    run(main)
