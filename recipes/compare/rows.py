"""The rows of a grid: read from what its runs wrote, or from a runs.csv, and written as tables.

A row says first where in the grid a run is (scheme, lr, seed, ...), then how it came out.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from tabulate import tabulate

from fairseq_admin.method.schemes import EVERY
from recipes.steps.common import read_lines, replacing, write_lines
from recipes.steps.results import as_cell, from_cell

Row = dict[str, Any]
TITLES = {"none": "head alone", **{name: scheme.title for name, scheme in EVERY.items()}}
"""Of schemes; `none` is a head without new layers, in make deeper."""


EMPTY = BeforeValidator(lambda cell: None if cell == "" else cell)
Number = Annotated[float | None, EMPTY]
Curve = Annotated[dict[int, float], BeforeValidator(lambda cell: from_cell(cell) if isinstance(cell, str) else cell)]
"""Bits per token by update; in a table a cell, as in `100:5.752 250:2.003`."""


class Run(BaseModel):
    """What every row has; where in the grid it is, is kept as it stands."""

    model_config = ConfigDict(extra="allow")

    scheme: str
    lr: str
    seed: str
    params: int
    seconds: int
    hardware: str
    commit: str


class Translated(Run):
    verdict: Literal["diverged", "plateau", "learned"]
    update: Annotated[int | None, EMPTY]
    bits: Number
    left: Number
    entropy: float
    bleu: Number
    signature: Annotated[str | None, EMPTY]
    train: Curve = {}
    valid: Curve


class Classified(Run):
    """Of make deeper: accuracies of 0 to 1."""

    diverged: bool
    valid: float
    test: float


def read_results(paths: Iterable[Path]) -> list[Row]:
    """The rows in the result.json of runs, or in tables such as runs.csv.

    Raises:
        ValueError: one is something else, or damaged; the message names the file, the row and what is wrong with it.
    """
    rows: list[Row] = []
    for path in paths:
        lines, number = read_lines(path), 0
        try:
            found = csv.DictReader(lines) if path.suffix == ".csv" else [json.loads("".join(lines))]
            for row in found:
                number += 1
                kind = Classified if "diverged" in row else Translated
                rows.append({**row, **kind.model_validate(row).model_dump(exclude_unset=True)})
        except ValueError as error:
            first = error.errors()[0] if isinstance(error, ValidationError) else None
            fault = f"its {first['loc'][0]} is {first['input']!r:.40}: {first['msg']}" if first else error
            what = "expected a grid's result.json or runs.csv. Fix it."
            raise ValueError(f"{path}: row {number}: {fault}; {what}") from None
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
