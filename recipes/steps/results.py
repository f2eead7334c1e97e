"""results.csv: a row per run. The run's own folder has the same as score.json."""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from recipes.steps.common import read_lines, read_object, replacing, write_lines
from recipes.steps.guard import alone
from recipes.steps.logs import as_cell, read_log

# One run is one row: the columns that tell runs apart, then what was measured, and the curve of validation. A score
# that a recipe does not have is empty, and so is the curve of a run before tables had one.
KEY = ("recipe", "method", "preset", "seed")
COLUMNS = (
    *KEY,
    *("params", "epochs", "updates", "tokens"),
    *("score", "signature", "tokenised", "tokenised_signature", "compound", "compound_signature"),
    "perplexity",
    *("average", "beam", "lenpen", "generate_args"),
    *("hours", "hardware", "commit"),
    "valid",
)


AVERAGED = ("score", "tokenised", "compound", "perplexity", "hours")
"""Columns that tables take the mean of."""


def read(table: Path) -> list[dict[str, str]]:
    """The rows; none if there is no such file yet.

    Raises:
        ValueError: the table has other columns, or a row has more or fewer, or a word for a number.
    """
    if not table.exists():
        return []
    lines = list(csv.reader(line.rstrip("\r") for line in read_lines(table)))
    columns = tuple(lines[0]) if lines else ()
    if columns not in (COLUMNS, COLUMNS[:-1]):
        raise ValueError(f"{table}: expected the columns {','.join(COLUMNS)}. Move the file away and run again.")
    for number, cells in enumerate(lines[1:], start=1):
        if len(cells) != len(columns):
            raise ValueError(
                f"{table}: row {number} has {len(cells)} cells, expected {len(columns)}. Fix it, or move the "
                "file away and run again."
            )
    rows = [{"valid": "", **dict(zip(columns, cells))} for cells in lines[1:]]
    for number, row in enumerate(rows, start=1):
        for name in AVERAGED:
            try:
                float(row[name] or 0)
            except ValueError:
                raise ValueError(f"{table}: row {number} has {row[name]!r} as {name}, expected a number.") from None
    return rows


def keep(table: Path, row: dict[str, object]) -> None:
    """Put the row into the table, replacing an older one of the same run.

    Raises:
        ValueError: the table has other columns.
    """
    with alone(table.with_name(f".{table.name}.guard")):
        rows = [old for old in read(table) if any(old[name] != str(row[name]) for name in KEY)]
        with replacing(table) as part, part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows([*rows, row])


def commit() -> str:
    """The commit of the code that ran, with "-dirty" after changes; "unknown" outside a git repository."""
    git = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def hardware() -> str:
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{os.cpu_count()} x {platform.machine()} CPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that `record` reads."""
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--results", type=Path, required=True, help="results.csv")
    parser.add_argument("--tokens", type=int, required=True, help="tokens of an update, for the table")
    parser.add_argument("--made", action="append", default=[], metavar="NAME=VALUE", help="a column, for the table")
    for name in KEY:
        parser.add_argument(f"--{name}", required=True, help="for the table")


def read_score(path: Path) -> dict[str, Any]:
    """What `record` kept of a run.

    Raises:
        ValueError: it is something else.
    """
    expected = "the score.json of a run. Remove it, and make that run's score again"
    return read_object(path, dict.fromkeys(KEY, str), expected)


def record(args: argparse.Namespace, scores: dict[str, str]) -> None:
    """Keep a run's scores, with what its RUN/train.log says, as its row of the table and as RUN/score.json.

    Args:
        args: those of `add_arguments`.
        scores: some of the columns.
    """
    log = read_log(args.run / "train.log")
    row = {name: getattr(args, name) for name in KEY} | {
        "params": log.params,
        "epochs": f"{log.epochs:.2f}",
        "updates": log.updates,
        "tokens": args.tokens,
        **scores,
        **dict(made.split("=", 1) for made in args.made),
        "hours": f"{log.hours:.2f}",
        "hardware": hardware(),
        "commit": commit(),
        "valid": as_cell(log.valid),
    }
    keep(args.results, row)
    write_lines(args.run / "score.json", [json.dumps(row, indent=2)])
