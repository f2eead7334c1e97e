"""Each scheme at its best learning rate: the one that is most accurate on validation, with the first seed.

The other seeds run at that rate alone.
"""

from __future__ import annotations

from pathlib import Path

from recipes.compare import grid_table
from recipes.compare.standing import Standing, standings
from recipes.steps.common import Kinds

KINDS: Kinds = {
    **{"diverged": bool, "valid": (int, float), "test": (int, float), "params": int, "seconds": int},
    **{"hardware": str, "commit": str},
}
"""What a result holds besides its axes."""


def read_results(paths: list[Path]) -> list[dict]:
    """As recipes.grid.run wrote them; or those of a runs.csv."""
    return grid_table.read_results(paths, kinds=KINDS)


def accuracy(result: dict) -> float:
    """A run's accuracy on the test set, which chose nothing. 0 to 1."""
    return result["test"]


def at_best_rates(results: list[dict]) -> list[Standing]:
    """Where each scheme and depth stands; the rate was chosen by the run that comes first, the first seed's alone."""
    return standings(results, order=lambda runs: -runs[0]["valid"], as_good=lambda runs, best: False)
