"""A run's log; results.csv with a row per run, also in the run's score.json; and the papers' numbers."""

from __future__ import annotations

import csv
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from fairseq_admin import logs
from fairseq_admin.outputs import replacing
from recipes.recipe import files
from recipes.steps.common import read_lines, write_lines
from recipes.steps.guard import locked

KEY = ("recipe", "method", "rule", "preset", "options", "seed")
"""The columns that identify a run; `rule` is the rule of omega, `options` what the user changed. The other columns are
measurements. A score that a recipe does not have is empty."""
COLUMNS = (
    *KEY,
    *("params", "epochs", "updates", "tokens"),
    *("score", "signature", "chrf", "chrf_signature"),
    *("tokenised", "tokenised_signature", "compound", "compound_signature"),
    "perplexity",
    *("average", "generate"),
    *("hours", "hardware", "commit"),
    "valid",
)


def checked_log(path: Path, unfinished: bool = False) -> logs.Log:
    """Read a run's log.

    Args:
        unfinished: accept a run that ended before its first training interval or validation.

    Raises:
        ValueError: the log has no parameter count, no training interval or no validation.
    """
    log = logs.read_log(path)
    if not (log.params and (unfinished or (log.train and log.valid))):
        raise ValueError(
            f"{path}: found {len(log.train)} training intervals, {len(log.valid)} validations and "
            f"{'a' if log.params else 'no'} parameter count; expected at least one of each. "
            "Is it the log of fairseq-train --log-format json? Remove the run's folder and train again."
        )
    return log


def as_cell(losses: dict[int, float]) -> str:
    """A curve of bits by update as one cell of a table, such as `100:5.752 250:2.003`."""
    return " ".join(f"{update}:{bits:.4g}" for update, bits in sorted(losses.items()))


def from_cell(text: str) -> dict[int, float]:
    """The curve in a cell of a table.

    Raises:
        ValueError: the cell is not a curve.
    """
    points = (point.split(":") for point in text.split())
    return {int(update): float(bits) for update, bits in points}


def read(table: Path) -> list[dict[str, str]]:
    """The rows of results.csv; empty without the file. Earlier versions had other columns, which stay.

    Raises:
        ValueError: it is another table.
    """
    if not table.exists():
        return []
    lines = csv.DictReader(line.rstrip("\r") for line in read_lines(table))
    if not {"recipe", "method", "seed"} <= {*(lines.fieldnames or ())}:
        raise ValueError(f"{table}: expected the columns {','.join(COLUMNS)}. Move the file away and run again.")
    return [dict.fromkeys(COLUMNS, "") | row for row in lines]


def write_runs(path: Path, rows: Iterable[dict[str, Any]], columns: Sequence[str] = ()) -> None:
    """Write rows as a table with the given columns, by default all that a row has. A curve is one cell."""
    cells = [{name: as_cell(it) if isinstance(it, dict) else it for name, it in row.items()} for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part, part.open("w", encoding="utf-8", newline="") as out:
        names = columns or list(dict.fromkeys(name for row in cells for name in row))
        writer = csv.DictWriter(out, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(cells)


def grouped(rows: Iterable[dict[str, Any]], *names: str) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    """The rows grouped by some of their entries, in order of appearance."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def write_table(path: Path, rows: Sequence[dict[str, Any]], notes: Iterable[str]) -> None:
    """Write PATH.csv, and PATH.md with notes below the table."""
    write_runs(path.with_suffix(".csv"), rows)
    lines = tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True).splitlines()
    write_lines(path.with_suffix(".md"), [*lines, "", *notes])


def keep(table: Path, row: dict[str, object]) -> None:
    """Put a row into results.csv. It replaces an older row of the same run.

    Raises:
        ValueError: the table has other columns.
    """
    with locked(table.with_name(f".{table.name}.guard")):
        others = [old for old in read(table) if any(old[name] != str(row[name]) for name in KEY)]
        columns = dict.fromkeys([*COLUMNS, *(name for old in others for name in old)])
        write_runs(table, [*others, row], list(columns))


def papers() -> list[dict[str, str]]:
    """The papers' numbers, each {recipe, method, bleu, source}."""
    return [
        {"recipe": target, "method": method, "bleu": bleu, "source": source}
        for target, (_, file, size) in files().items()
        for part in (file, file.sizes[size])
        for source, numbers in part.paper.items()
        for method, bleu in numbers.items()
    ]


def is_attempt(row: dict[str, str]) -> bool:
    """Whether a run is an attempt at a paper's number. A small or changed run, or one by another rule, is not."""
    return row["preset"] in ("", "paper") and row["rule"] in ("", "reference") and not row["options"]


def commit() -> str:
    """The commit of this code, with "-dirty" if it was changed; "unknown" outside a git repository."""
    git = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    described = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True)
    return described.stdout.strip() or "unknown"


def hardware() -> str:
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{os.cpu_count()} x {platform.machine()} CPU"


def record(run: Path, table: Path, key: dict[str, str], measured: dict[str, object]) -> None:
    """Write a run's row, with the numbers of RUN/train.log, to the table and to RUN/score.json.

    Args:
        key: the columns KEY.
        measured: further columns, such as scores.
    """
    log = checked_log(run / "train.log")
    row = {**key, "params": log.params, "epochs": f"{log.epochs:.2f}", "updates": log.updates, **measured}
    row |= {"hours": f"{log.hours:.2f}", "hardware": hardware(), "commit": commit(), "valid": as_cell(log.valid)}
    keep(table, row)
    write_lines(run / "score.json", [json.dumps(row, indent=2)])
