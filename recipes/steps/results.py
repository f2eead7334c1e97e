"""results.csv: a row a run."""

from __future__ import annotations

import csv
from pathlib import Path

from recipes.steps.common import replacing

# One run is one row: the columns that tell runs apart, then what was measured. A score that a recipe has not is empty.
KEY = ("recipe", "method", "preset", "seed")
COLUMNS = (
    *KEY,
    *("params", "epochs", "updates", "tokens"),
    *("score", "signature", "tokenised", "tokenised_signature", "compound", "compound_signature"),
    "perplexity",
    *("hours", "hardware", "commit"),
)


def read(table: Path) -> list[dict[str, str]]:
    """The rows; none if there is no such file yet.

    Raises:
        ValueError: the table has other columns.
    """
    if not table.exists():
        return []
    with table.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise ValueError(f"{table}: expected the columns {','.join(COLUMNS)}. Move the file away and run again.")
    return rows


def keep(table: Path, row: dict[str, object]) -> None:
    """Put the row into the table, in place of an older one of the same run.

    Raises:
        ValueError: the table has other columns.
    """
    rows = [old for old in read(table) if any(old[name] != str(row[name]) for name in KEY)]
    with replacing(table) as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*rows, row])
