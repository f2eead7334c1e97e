"""Each scheme at its best learning rate: the one that is most accurate on validation, with the first seed.

    python -m recipes.deeper.standing OUT/best.txt OUT/*-s1/result.json

writes what recipes/compare/best.py does. The other seeds run at that rate alone.
"""

from __future__ import annotations

import csv
from pathlib import Path

from recipes.compare.best import choose
from recipes.compare.standing import Standing, standings
from recipes.steps.common import Kinds, check_rate, read_lines, read_object, run
from recipes.steps.plugin import EVERY

ALONE = "none"
"""The scheme of a head without new layers."""

NUMBERS = {"valid": float, "test": float, "params": int, "seconds": int}
KINDS: Kinds = {
    **{"scheme": str, "layers": str, "lr": str, "seed": str, "diverged": bool},
    **{"valid": (int, float), "test": (int, float), "params": int, "seconds": int, "hardware": str, "commit": str},
}
"""What a result holds."""

EXPECTED = "the result.json of a cell of make deeper. Give that"


def read_results(paths: list[Path]) -> list[dict]:
    """As recipes.deeper.result wrote them; or those of a runs.csv."""
    if [path.suffix for path in paths] == [".csv"]:
        return read_runs(paths[0])
    return [checked(read_object(path, KINDS, EXPECTED), path) for path in paths]


def checked(result: dict, path: Path) -> dict:
    """The same, of a scheme that is there, at a rate.

    Raises:
        ValueError: it is not.
    """
    if result["scheme"] not in (ALONE, *EVERY):
        raise ValueError(f"{path}: its scheme is {result['scheme']}; expected one of {', '.join([ALONE, *EVERY])}.")
    check_rate(path, result["lr"])
    return result


def read_runs(path: Path) -> list[dict]:
    """The same from a runs.csv.

    Raises:
        ValueError: a column is missing.
    """
    rows: list[dict] = list(csv.DictReader(read_lines(path)))
    if missing := [name for name in KINDS if not rows or name not in rows[0]]:
        raise ValueError(f"{path}: has no column {missing[0]}; expected the runs.csv of make deeper. Give that.")
    for number, row in enumerate(rows, start=1):
        if None in row or None in row.values():
            raise ValueError(f"{path}: row {number} has other columns than the first line names. Mend it.")
        try:
            row |= {name: kind(row[name]) for name, kind in NUMBERS.items()}
        except ValueError as error:
            raise ValueError(f"{path}: row {number}: {error}; expected a number. Mend it.") from None
        row["diverged"] = row["diverged"] == "True"
        checked(row, path)
    return rows


def accuracy(result: dict) -> float:
    """A run's accuracy on the test set, which chose nothing. 0 to 1."""
    return result["test"]


def at_best_rates(results: list[dict]) -> list[Standing]:
    """Where each scheme and depth stands; the rate was chosen by the run that comes first, the first seed's alone."""
    return standings(results, order=lambda runs: -runs[0]["valid"], as_good=lambda runs, best: False)


if __name__ == "__main__":
    run(lambda: choose(lambda paths: at_best_rates(read_results(paths))))
