"""The tables of docs/results.md that say how schemes come out, from the rows that docs/ keeps: `make tables`.

    python -m recipes.figures.tables docs/results.md

writes each table of TABLES into a page, in place of what is between `<!-- table NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Container, Sequence
from functools import partial
from pathlib import Path

from recipes.compare import ranking
from recipes.compare.rows import Row, grouped, read_results, titled
from recipes.figures.drawing import by_level
from recipes.steps.common import replacing, run

DOCS = Path(__file__).resolve().parents[2] / "docs"


def standing(rows: Sequence[Row], without: Container[str]) -> list[Row]:
    """How schemes stand in make compare, but for some columns."""
    return [{key: row[key] for key in row if key not in without} for row in titled(ranking.table(rows))]


def learning(rows: Sequence[Row]) -> list[Row]:
    """At which rates a scheme learns with every seed, a column for each value of the grid's other axis."""

    def rates(runs: Sequence[Row]) -> str:
        by_rate = grouped(sorted(runs, key=lambda row: float(row["lr"])), "lr").items()
        return " ".join(rate for (rate,), same in by_rate if {row["verdict"] for row in same} == {"learned"}) or "none"

    return [
        {"scheme": title, **{label: rates(runs) for label, (_, runs) in lines.items()}}
        for title, lines in by_level(rows).items()
    ]


TABLES: dict[str, tuple[Callable[[list[Row]], list[Row]], str]] = {
    "every-scheme": (partial(standing, without={"layers", "learned", "left the plateau at"}), "compare.csv"),
    "multi30k": (partial(standing, without={"window", "left the plateau at"}), "multi30k.csv"),
    "sensitivity-18l": (learning, "sensitivity-18l.csv"),
    "warmup": (learning, "warmup.csv"),
}
"""By name what it says, and of which rows."""


def table(name: str) -> str:
    made_of, file = TABLES[name]
    rows = made_of(read_results([DOCS / file]))
    lines = [rows[0], ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def write_tables(page: str) -> str:
    """A page with its tables as the rows have them.

    Raises:
        ValueError: the page names a table that is not one of TABLES.
    """

    def written(place: re.Match[str]) -> str:
        if place[1] not in TABLES:
            raise ValueError(f"found a place for the table {place[1]}; expected one of {', '.join(TABLES)}.")
        return f"<!-- table {place[1]} -->\n{table(place[1])}<!-- end -->"

    return re.sub(r"<!-- table (\S+) -->\n.*?<!-- end -->", written, page, flags=re.S)


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        text = write_tables(path.read_text(encoding="utf-8"))
        with replacing(path) as part:
            part.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    run(main)
