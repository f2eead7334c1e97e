"""The tables of results in README.md and docs/, from the rows that docs/ keeps.

    python -m recipes.figures.tables README.md docs/*.md

writes each table of TABLES into a page, in place of what is between `<!-- table NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path

from recipes.compare import standing
from recipes.compare.grid_table import read_results, spread
from recipes.deeper import standing as deeper
from recipes.deeper import summary
from recipes.steps import results
from recipes.steps.common import replacing, run
from recipes.steps.logs import from_cell
from recipes.steps.plugin import EVERY, SCHEMES

DOCS = Path(__file__).resolve().parents[2] / "docs"
Rows = list[dict[str, str]]


def compared(name: str, *without: str) -> Rows:
    """Each scheme at its best rate, less some columns."""
    rows = standing.table(read_results([DOCS / name]))
    titled = [{**row, "scheme": SCHEMES[row["scheme"]].title} for row in rows]
    return [{column: text for column, text in row.items() if column not in without} for row in titled]


def by_method(recipe: str, measures: dict[str, Callable[[dict[str, str]], float]]) -> Rows:
    """The runs of results.csv, a column a method: the mean and range over its seeds."""
    runs = [row for row in results.read(DOCS / "results.csv") if row["recipe"] == recipe]
    methods = {EVERY[row["method"]].title: [it for it in runs if it["method"] == row["method"]] for row in runs}
    return [
        {"": title} | {method: spread([measure(row) for row in rows], 2) for method, rows in methods.items()}
        for title, measure in measures.items()
    ]


def bits(update: int, row: dict[str, str]) -> float:
    return from_cell(row["valid"])[update]


def valid(*updates: int) -> dict[str, Callable[[dict[str, str]], float]]:
    """The validation losses at some updates, as measures."""
    return {f"bits, update {update}": functools.partial(bits, update) for update in updates}


def on_top(name: str) -> Rows:
    """Accuracies with the most new layers, and of the head alone: seed 1 at each rate, every seed at the best."""
    runs = deeper.read_results([DOCS / name])
    deepest = max((run["layers"] for run in runs), key=int)
    runs = [run for run in runs if run["layers"] in (deepest, "0")]
    rates = sorted({run["lr"] for run in runs}, key=float)
    table = []
    for row in summary.rows(runs):
        tried = {it["lr"]: it["test"] for it in runs if it["scheme"] == row["scheme"] and it["seed"] == runs[0]["seed"]}
        cells = {f"seed 1, {rate}": f"{tried[rate]:.2f}" if rate in tried else "" for rate in rates}
        kept = {column: row[column] for column in ("best rate", "accuracy, test", "vs. Admin", "vs. Post-LN")}
        table.append({"scheme": summary.title(row["scheme"]), **cells, **kept})
    return table


def depth() -> Rows:
    table = []
    for scheme in ("post-ln", "pre-ln", "admin"):
        measured = json.loads((DOCS / f"output-change-{scheme}.json").read_text(encoding="utf-8"))
        for change, series in measured["series"].items():
            first, last = series["change"][0], series["change"][-1]
            row = {"": f"{EVERY[scheme].title}, {change}", "at 6 layers": f"{first:.2g}", "at 48 layers": f"{last:.2g}"}
            fits = {f"R² on {law}": f"{series['fits'][name]['r2']:.3f}" for law, name in LAWS.items()}
            table.append(row | {"ratio": f"{last / first:.1f}"} | fits)
    return table


def median(row: dict[str, str]) -> str:
    """A ratio and its range."""
    return f"{float(row['ratio']):.2f} ({float(row['ratio_low']):.2f} to {float(row['ratio_high']):.2f})"


def speed() -> Rows:
    """A column a size; of memory and bytes the share of stock's."""
    sizes: dict[str, dict[str, dict[str, str]]] = {}
    with (DOCS / "bench/speed.csv").open(encoding="utf-8", newline="") as file:
        measured = list(csv.DictReader(file))
    for row in measured:
        size = f"{row['layers']}L-{row['decoder_layers']}L, width {row['width']}"
        sizes.setdefault(size, {})[row["method"]] = row
    table: Rows = [
        {"": f"a step, {title}"} | {size: median(rows[method]) for size, rows in sizes.items()}
        for title, method in {"Admin, fast": "admin", "Admin, plain": "admin-plain", "Pre-LN": "pre-ln"}.items()
    ]
    for title, column in SHARES.items():
        shares = {size: float(rows["admin"][column]) / float(rows["post-ln"][column]) for size, rows in sizes.items()}
        table.append({"": title} | {size: f"{share:.2f}" for size, share in shares.items()})
    return table


LAWS = {"N": "linear", "log N": "logarithmic"}
SHARES = {"bytes saved for the backward": "kept_mib", "peak memory of the process": "peak_mib"}
SCORE: dict[str, Callable[[dict[str, str]], float]] = {"sacreBLEU, test": lambda row: float(row["score"])}
TABLES: dict[str, Callable[[], Rows]] = {
    "demo": lambda: by_method("demo", SCORE | valid(100, 250, 400, 700, 1000)),
    "tatoeba": lambda: by_method("own/tatoeba_deen/de-en", SCORE | valid(1000, 2000)),
    "language-model": lambda: by_method("lm-demo", {"perplexity, test": lambda row: float(row["perplexity"])}),
    "every-scheme": lambda: compared("compare.csv", "layers", "learned", "left the plateau at"),
    "multi30k": lambda: compared("multi30k.csv", "window", "left the plateau at"),
    "deeper": lambda: on_top("deeper.csv"),
    "depth": depth,
    "speed": speed,
}


def markdown(rows: Rows) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def write_tables(page: str) -> str:
    """A page with its tables as the rows have them.

    Raises:
        ValueError: the page names a table that is not one of TABLES.
    """

    def replace(match: re.Match[str]) -> str:
        if match[1] not in TABLES:
            raise ValueError(f"found a place for the table {match[1]}; expected one of {', '.join(TABLES)}.")
        return f"<!-- table {match[1]} -->\n{markdown(TABLES[match[1]]())}<!-- end -->"

    return re.sub(r"<!-- table (\S+) -->\n.*?<!-- end -->", replace, page, flags=re.S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", type=Path, nargs="+")
    for path in parser.parse_args().pages:
        text = path.read_text(encoding="utf-8")
        if (written := write_tables(text)) != text:
            with replacing(path) as part:
                part.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    run(main)
