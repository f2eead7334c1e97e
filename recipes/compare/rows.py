"""The rows of a grid: a table of one that each run writes, or of all of them."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from fairseq_admin.method.schemes import SCHEMES
from recipes.steps.common import read_lines, replacing, write_lines
from recipes.steps.results import as_cell, from_cell

Row = dict[str, Any]
"""A run's place in the grid, as texts, then its outcome. `valid` is the loss on validation, in bits per token by
update; in make deeper it is an accuracy of 0 to 1, as `test` is."""
TITLES = {"none": "head alone", **{name: scheme.title for name, scheme in SCHEMES.items()}}
"""The schemes' titles; `none` is a head without new layers, in make deeper."""
NUMBERS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("update", "params", "seconds"), int),
    **dict.fromkeys(("bits", "entropy", "bleu", "test"), float),
    "diverged": lambda cell: cell == "True",
}


def from_cells(row: dict[str, str]) -> Row:
    """A row of a table; an empty cell is None, and a curve `100:5.752 250:2.003`."""
    kinds = {**NUMBERS, "valid": float if "diverged" in row else from_cell}
    return {name: kinds.get(name, str)(cell) if cell or name == "valid" else None for name, cell in row.items()}


def read_results(paths: Iterable[Path]) -> list[Row]:
    """The rows of tables.

    Raises:
        ValueError: one is something else, or damaged.
    """
    rows: list[Row] = []
    for path in paths:
        try:
            rows += map(from_cells, csv.DictReader(read_lines(path)))
        except ValueError as error:
            raise ValueError(f"{path}: {error}; expected the rows of a grid. Fix it.") from None
    return rows


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple[str, ...], list[Row]]:
    """The rows by some of their entries, in order of appearance."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def values(rows: Iterable[Row], name: str, order: Callable[[str], Any] = str) -> list[str]:
    """The values of an entry of the rows, each once."""
    return sorted({row[name] for row in rows}, key=order)


def depths_of(rows: Iterable[Row]) -> list[str]:
    """The depths of the rows, ascending; each is the layers of both stacks, or ENCODER-DECODER."""
    return values(rows, "layers", lambda depth: list(map(int, depth.split("-"))))


def sizes(depth: str) -> str:
    """A depth as the papers write it, as 18L-18L."""
    encoder, _, decoder = depth.partition("-")
    return f"{encoder}L-{decoder or encoder}L"


def write_runs(path: Path, rows: Iterable[Row]) -> None:
    """A table that `read_results` reads: a curve is one cell."""
    cells = [{name: as_cell(it) if isinstance(it, dict) else it for name, it in row.items()} for row in rows]
    with replacing(path) as part, part.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, cells[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(cells)


def titled(rows: Iterable[Row]) -> list[Row]:
    """The rows with the schemes' titles in place of their names."""
    return [{**row, "scheme": TITLES.get(row["scheme"], row["scheme"])} for row in rows]


def write_table(path: Path, rows: Sequence[Row], notes: Iterable[str]) -> None:
    """Write PATH.csv, and PATH.md with notes below."""
    write_runs(path.with_suffix(".csv"), rows)
    lines = tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True).splitlines()
    write_lines(path.with_suffix(".md"), [*lines, "", *notes])
