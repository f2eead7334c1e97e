"""Figures of README.md and docs/, and the tables of docs/results.md, from the rows in docs/rows.

`make figures` writes them. A table is between `<!-- table NAME -->` and `<!-- end -->`. `fairseq-admin analyze` draws
the other figures; docs/analysis.md has the commands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from recipes.research import ranking
from recipes.research.drawing import draw_accuracies, draw_losses, draw_rates, save
from recipes.research.rows import TITLES, Row, read_results, titled
from recipes.steps import results
from recipes.steps.common import run, write_lines
from recipes.steps.results import from_cell
from recipes.steps.summary import titled as rule_title

DOCS = Path(__file__).resolve().parents[2] / "docs"
ROWS = DOCS / "rows"
GRIDS = {**dict.fromkeys(("compare", "sensitivity-18l", "warmup"), draw_rates), "deeper": draw_accuracies}
"""The functions that draw the figures of grids, by the name of the figure and of its rows."""
DEMO_ENTROPY = 6.62
"""The entropy of a token of the demo's text, in bits."""


def at_one_depth(rows: list[Row]) -> list[Row]:
    """The table of make compare, without the depth and the number of runs that learned."""
    table = titled(ranking.table(rows))
    return [{title: row[title] for title in row if title not in ("layers", "learned")} for row in table]


TABLES: dict[str, tuple[Callable[[list[Row]], list[Row]], str]] = {
    "every-scheme": (at_one_depth, "compare.csv"),
    "sensitivity-18l": (ranking.learning, "sensitivity-18l.csv"),
}
"""Tables of the pages by name: the function that makes a table, and its rows."""


def table(name: str) -> str:
    tabulated, file = TABLES[name]
    rows = tabulated(read_results([ROWS / file]))
    lines = [rows[0], ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def write_tables(page: str) -> str:
    """The text of a page with its tables made again from the rows.

    Raises:
        ValueError: the page names a table that is not in TABLES.
    """

    def written(place: re.Match[str]) -> str:
        if place[1] not in TABLES:
            raise ValueError(f"found a place for the table {place[1]}; expected one of {', '.join(TABLES)}.")
        return f"<!-- table {place[1]} -->\n{table(place[1])}<!-- end -->"

    return re.sub(r"<!-- table (\S+) -->\n.*?<!-- end -->", written, page, flags=re.S)


def draw_results(rows: Sequence[dict[str, str]], entropy: float) -> Figure:
    """The validation losses of a recipe, a curve for each row of results.csv."""
    lines = []
    for row in sorted(rows, key=lambda row: -float(row["valid"].rpartition(":")[2])):
        one: Row = {"scheme": row["method"], "rule": row["rule"], "verdict": "", "valid": from_cell(row["valid"])}
        name, end = rule_title(TITLES[row["method"]], row["rule"]), row["valid"].rpartition(":")[2]
        lines.append(("", f"{name}: {float(end):.2f} bits, BLEU {float(row['score']):.1f}", [one]))
    return draw_losses(lines, entropy)


def main() -> None:
    page = DOCS / "results.md"
    write_lines(page, write_tables(page.read_text(encoding="utf-8")).splitlines())
    for name, draw in GRIDS.items():
        save(draw(read_results([ROWS / f"{name}.csv"])), DOCS / f"images/{name}.png", dpi=120)
    demos = [row for row in results.read(ROWS / "results.csv") if (row["recipe"], row["seed"]) == ("demo", "1")]
    save(draw_results(demos, DEMO_ENTROPY), DOCS / "images/demo-loss.png")


if __name__ == "__main__":
    run(main)
