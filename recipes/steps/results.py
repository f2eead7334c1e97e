"""A run's log, and results.csv: a row per run, which the run's own folder has as score.json; the papers' numbers."""

from __future__ import annotations

import csv
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from fairseq_admin import logs
from fairseq_admin.method.schemes import SCHEMES
from recipes.steps.common import read_lines, replacing, write_lines
from recipes.steps.guard import locked

PAPERS = Path(__file__).parents[1] / "papers.csv"
KEY = ("recipe", "method", "rule", "preset", "seed")
"""The columns that tell runs apart; the rule is that of omega. Then come the measurements, and the curve of validation.
A score that a recipe does not have is empty."""
COLUMNS = (
    *KEY,
    *("params", "epochs", "updates", "tokens"),
    *("score", "signature", "tokenised", "tokenised_signature", "compound", "compound_signature"),
    "perplexity",
    *("average", "beam", "lenpen", "generate_args"),
    *("hours", "hardware", "commit"),
    "valid",
)


def read_log(path: str | Path, unfinished: bool = False) -> logs.Log:
    """Read a run's log.

    Args:
        unfinished: also take a run that ended before its first training interval or validation.

    Raises:
        ValueError: the log is missing, or has no training interval, no validation or no parameter count.
    """
    log = logs.parse_log(read_lines(path))
    if not (log.params and (unfinished or (log.train and log.valid))):
        raise ValueError(
            f"{path}: found {len(log.train)} training intervals, {len(log.valid)} validations and "
            f"{'a' if log.params else 'no'} parameter count; expected at least one of each. "
            "Is it the log of fairseq-train --log-format json? Remove the run's folder and train again."
        )
    return log


def as_cell(losses: dict[int, float]) -> str:
    """A curve as one cell of a table, as in `100:5.752 250:2.003`: bits by update."""
    return " ".join(f"{update}:{bits:.4g}" for update, bits in sorted(losses.items()))


def from_cell(text: str) -> dict[int, float]:
    """The curve in such a cell.

    Raises:
        ValueError: it is something else.
    """
    points = (point.split(":") for point in text.split())
    return {int(update): float(bits) for update, bits in points}


def with_rule(row: dict[str, Any]) -> dict[str, Any]:
    """A run's row. One of version 0.1 has no rule: it was `reference`, the default."""
    scheme = SCHEMES.get(row["method"])
    return row if "rule" in row else {**row, "rule": "reference" if scheme and scheme.omega else ""}


def read(table: Path) -> list[dict[str, str]]:
    """The rows; none if there is no such file yet. A table of version 0.1 has no column of rules.

    Raises:
        ValueError: the table has other columns.
    """
    if not table.exists():
        return []
    lines = csv.DictReader(line.rstrip("\r") for line in read_lines(table))
    if tuple(lines.fieldnames or ()) not in (COLUMNS, tuple(name for name in COLUMNS if name != "rule")):
        raise ValueError(f"{table}: expected the columns {','.join(COLUMNS)}. Move the file away and run again.")
    return list(map(with_rule, lines))


def keep(table: Path, row: dict[str, object]) -> None:
    """Put the row into the table, replacing an older one of the same run.

    Raises:
        ValueError: the table has other columns.
    """
    with locked(table.with_name(f".{table.name}.guard")):
        rows = [old for old in read(table) if any(old[name] != str(row[name]) for name in KEY)]
        with replacing(table) as part, part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows([*rows, row])


def papers() -> list[dict[str, str]]:
    """The papers' numbers, {recipe, method, bleu, source} each. Only a run with the preset "paper" attempts them."""
    with PAPERS.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def commit() -> str:
    """The commit of the code that ran, with "-dirty" after changes; "unknown" outside a git repository."""
    git = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    described = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True)
    return described.stdout.strip() or "unknown"


def hardware() -> str:
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{os.cpu_count()} x {platform.machine()} CPU"


def record(run: Path, table: Path, key: dict[str, str], measured: dict[str, object]) -> None:
    """Keep a run's scores, with the numbers of RUN/train.log, as its row of the table and as RUN/score.json.

    Args:
        key: the columns KEY.
        measured: other columns.
    """
    log = read_log(run / "train.log")
    row = {**key, "params": log.params, "epochs": f"{log.epochs:.2f}", "updates": log.updates, **measured}
    row |= {"hours": f"{log.hours:.2f}", "hardware": hardware(), "commit": commit(), "valid": as_cell(log.valid)}
    keep(table, row)
    write_lines(run / "score.json", [json.dumps(row, indent=2)])
