"""The rows of a grid. Each run writes a table of one row; the grid has a table of all rows."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fairseq_admin.method.schemes import SCHEMES
from recipes.steps.common import read_lines
from recipes.steps.results import from_cell

Row = dict[str, Any]
"""A run's axes, as texts, then its outcome. `valid` is the loss on validation, in bits per token, by update. In make
deeper, `valid` and `test` are accuracies from 0 to 1."""
TITLES = {"none": "head alone", **{name: scheme.title for name, scheme in SCHEMES.items()}}
"""The titles of the schemes. In make deeper, `none` is a head without new layers."""
NUMBERS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("update", "params", "seconds"), int),
    **dict.fromkeys(("bits", "entropy", "bleu", "test"), float),
    "diverged": lambda cell: cell == "True",
}


def from_cells(row: dict[str, str]) -> Row:
    """Convert a table's cells to values. An empty cell is None; a curve is a cell such as `100:5.752 250:2.003`."""
    kinds = {**NUMBERS, "valid": float if "diverged" in row else from_cell}
    return {name: kinds.get(name, str)(cell) if cell or name == "valid" else None for name, cell in row.items()}


def read_results(paths: Iterable[Path]) -> list[Row]:
    """The rows of some tables.

    Raises:
        ValueError: a file is not a table of a grid, or is damaged.
    """
    rows: list[Row] = []
    for path in paths:
        try:
            rows += map(from_cells, csv.DictReader(read_lines(path)))
        except ValueError as error:
            raise ValueError(f"{path}: {error}; expected the rows of a grid. Fix it.") from None
    return rows


def values(rows: Iterable[Row], name: str, order: Callable[[str], Any] = str) -> list[str]:
    """The different values of an entry, sorted."""
    return sorted({row[name] for row in rows}, key=order)


def depths_of(rows: Iterable[Row]) -> list[str]:
    """The different depths, ascending. A depth is the layers of each stack, or ENCODER-DECODER."""
    return values(rows, "layers", lambda depth: list(map(int, depth.split("-"))))


def sizes(depth: str) -> str:
    """A depth as the papers write it, such as 18L-18L."""
    encoder, _, decoder = depth.partition("-")
    return f"{encoder}L-{decoder or encoder}L"


def titled(rows: Iterable[Row]) -> list[Row]:
    """The rows, with titles of schemes instead of names."""
    return [{**row, "scheme": TITLES.get(row["scheme"], row["scheme"])} for row in rows]
