"""The tables of docs/results.md that say how schemes stand, from the rows that docs/ keeps: `make tables`.

    python -m recipes.figures.tables docs/results.md

writes each table of TABLES into a page, in place of what is between `<!-- table NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from recipes.compare import ranking
from recipes.compare.rows import read_results, titled
from recipes.steps.common import replacing, run

DOCS = Path(__file__).resolve().parents[2] / "docs"
TABLES = {
    "every-scheme": ("compare.csv", {"layers", "learned", "left the plateau at"}),
    "multi30k": ("multi30k.csv", {"window", "left the plateau at"}),
}
"""By name the rows, and the columns that are not shown."""


def table(name: str) -> str:
    file, without = TABLES[name]
    rows = titled(ranking.table(read_results([DOCS / file])))
    kept = [column for column in rows[0] if column not in without]
    lines = [kept, ["---"] * len(kept), *([row[column] for column in kept] for row in rows)]
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
