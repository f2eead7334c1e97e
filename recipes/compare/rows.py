"""The rows of a grid: read from what its runs wrote, or from a runs.csv, and written as tables."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from fairseq_admin.method.schemes import SCHEMES
from recipes.steps.common import read_lines, replacing, write_lines
from recipes.steps.results import as_cell, from_cell

Row = dict[str, Any]
"""Where in the grid a run is, as texts, then how it came out. `valid` is the loss on validation, in bits per token by
update; of make deeper it is an accuracy of 0 to 1, as `test` is."""
TITLES = {"none": "head alone", **{name: scheme.title for name, scheme in SCHEMES.items()}}
"""Of schemes; `none` is a head without new layers, in make deeper."""
NUMBERS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("update", "params", "seconds"), int),
    **dict.fromkeys(("bits", "left", "entropy", "bleu", "test"), float),
    "diverged": lambda cell: cell == "True",
}


def from_cells(row: dict[str, str]) -> Row:
    """A row of a table; an empty cell is None, and a curve `100:5.752 250:2.003`."""
    kinds = {**NUMBERS, "valid": float if "diverged" in row else from_cell}
    return {name: kinds.get(name, str)(cell) if cell or name == "valid" else None for name, cell in row.items()}


def from_result(text: str) -> Row:
    """A result.json: its curves have texts for updates."""
    return {
        name: {int(update): bits for update, bits in value.items()} if isinstance(value, dict) else value
        for name, value in json.loads(text).items()
    }


def read_results(paths: Iterable[Path]) -> list[Row]:
    """The rows in the result.json of runs, or in tables such as runs.csv.

    Raises:
        ValueError: one is something else, or damaged.
    """
    rows: list[Row] = []
    for path in paths:
        lines = read_lines(path)
        try:
            rows += map(from_cells, csv.DictReader(lines)) if path.suffix == ".csv" else [from_result("".join(lines))]
        except ValueError as error:
            raise ValueError(f"{path}: {error}; expected a grid's result.json or runs.csv. Fix it.") from None
    return rows


def places_of(row: Row) -> list[str]:
    """Where in a grid a run is, but for its seed: what comes before how it came out."""
    names = itertools.takewhile(lambda name: name not in ("verdict", "diverged"), row)
    return [name for name in names if name != "seed"]


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple[str, ...], list[Row]]:
    """The rows by some of their entries, in order of appearance."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def values(rows: Iterable[Row], name: str, order: Callable[[str], Any] = str) -> list[str]:
    """What an entry of the rows is, each once."""
    return sorted({row[name] for row in rows}, key=order)


def depths_of(rows: Iterable[Row]) -> list[str]:
    """The depths of the rows, ascending; each is the layers of both stacks, or ENCODER-DECODER."""
    return values(rows, "layers", lambda depth: list(map(int, depth.split("-"))))


def sizes(depth: str) -> str:
    """A depth as the papers write it, as 18L-18L."""
    encoder, _, decoder = depth.partition("-")
    return f"{encoder}L-{decoder or encoder}L"


def write_runs(path: Path, rows: Iterable[Row]) -> None:
    """A table that `read_results` reads: a curve is one cell, and that of training is left out."""
    kept = [{name: value for name, value in row.items() if name != "train"} for row in rows]
    cells = [{name: as_cell(it) if isinstance(it, dict) else it for name, it in row.items()} for row in kept]
    with replacing(path) as part, part.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, cells[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(cells)


def titled(rows: Iterable[Row]) -> list[Row]:
    """With the schemes' titles in place of their names."""
    return [{**row, "scheme": TITLES[row["scheme"]]} for row in rows]


def write_table(path: Path, rows: Sequence[Row], notes: Iterable[str], shown: Sequence[Row] | None = None) -> None:
    """PATH.csv and, with notes below and the rows as they are `shown`, PATH.md."""
    write_runs(path.with_suffix(".csv"), rows)
    lines = tabulate(shown or rows, headers="keys", tablefmt="github", disable_numparse=True).splitlines()
    write_lines(path.with_suffix(".md"), [*lines, "", *notes])
