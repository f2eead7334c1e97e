"""The tables of results in README.md and docs/, from the rows that docs/ keeps.

    python -m recipes.figures.tables README.md docs/*.md

writes each table of TABLES into a page, in place of what is between `<!-- table NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from recipes.compare import ranking
from recipes.compare.intervals import with_range
from recipes.compare.rows import TITLES, Row, grouped, read_results, titled, values
from recipes.steps import results
from recipes.steps.common import replacing, run
from recipes.steps.results import from_cell

DOCS = Path(__file__).resolve().parents[2] / "docs"
Rows = list[Row]


def compared(name: str, *without: str) -> Rows:
    """Each scheme at its best rate, less some columns."""
    rows = titled(ranking.table(read_results([DOCS / name])))
    return [{column: text for column, text in row.items() if column not in without} for row in rows]


def by_method(recipe: str, column: str, measure: str, *updates: int) -> Rows:
    """The runs of results.csv, a column a method: the mean and range over its seeds.

    Args:
        column: what they are judged by, and what it is called.
        updates: at which the loss on validation is shown.
    """
    runs = [row for row in results.read(DOCS / "results.csv") if row["recipe"] == recipe]
    table: Rows = [{"": measure}, *({"": f"bits, update {update}"} for update in updates)]
    for (method,), seeds in grouped(runs, "method").items():
        curves = [from_cell(row["valid"]) for row in seeds]
        measured = [[float(row[column]) for row in seeds], *([curve[update] for curve in curves] for update in updates)]
        for row, numbers in zip(table, measured):
            row[TITLES[method]] = with_range(numbers, 2)
    return table


def on_top(name: str) -> Rows:
    """Accuracies with the most new layers, and of the head alone: seed 1 at each rate, every seed at the best."""
    runs = read_results([DOCS / name])
    deepest = max((run["layers"] for run in runs), key=int)
    runs = [run for run in runs if run["layers"] in (deepest, "0")]
    rates = values(runs, "lr", float)
    tried = {(run["scheme"], run["lr"]): f"{run['test']:.2f}" for run in runs if run["seed"] == "1"}
    return titled(
        {"scheme": row["scheme"]}
        | {f"seed 1, {rate}": tried.get((row["scheme"], rate), "") for rate in rates}
        | {column: row[column] for column in ("best rate", "accuracy, test", "vs. Admin", "vs. Post-LN")}
        for row in ranking.table_of_accuracies(runs)
    )


def depth() -> Rows:
    table = []
    for scheme in ("post-ln", "pre-ln", "admin"):
        measured = json.loads((DOCS / f"output-change-{scheme}.json").read_text(encoding="utf-8"))
        for change, series in measured["series"].items():
            first, last = series["change"][0], series["change"][-1]
            row = {"": f"{TITLES[scheme]}, {change}", "at 6 layers": f"{first:.2g}", "at 48 layers": f"{last:.2g}"}
            fits = {f"R² on {law}": f"{series['fits'][name]['r2']:.3f}" for law, name in LAWS.items()}
            table.append(row | {"ratio": f"{last / first:.1f}"} | fits)
    return table


def speed() -> Rows:
    """A column a size: ratios of time with their range; of memory and bytes the share of stock's."""
    table = {name: {"": name} for name in (*STEPS.values(), *SHARES.values())}
    with (DOCS / "bench/speed.csv").open(encoding="utf-8", newline="") as file:
        sizes = grouped(csv.DictReader(file), "layers", "decoder_layers", "width")
    for (layers, decoder_layers, width), rows in sizes.items():
        size, methods = f"{layers}L-{decoder_layers}L, width {width}", {row["method"]: row for row in rows}
        for method, name in STEPS.items():
            ratio, low, high = (float(methods[method][f"ratio{end}"]) for end in ("", "_low", "_high"))
            table[name][size] = f"{ratio:.2f} ({low:.2f} to {high:.2f})"
        for column, name in SHARES.items():
            table[name][size] = f"{float(methods['admin'][column]) / float(methods['post-ln'][column]):.2f}"
    return list(table.values())


LAWS = {"N": "linear", "log N": "logarithmic"}
STEPS = {"admin": "a step, Admin, fast", "admin-plain": "a step, Admin, plain", "pre-ln": "a step, Pre-LN"}
SHARES = {"kept_mib": "bytes saved for the backward", "peak_mib": "peak memory of the process"}
BLEU = "score", "sacreBLEU, test"
TABLES: dict[str, Callable[[], Rows]] = {
    "demo": lambda: by_method("demo", *BLEU, 100, 250, 400, 700, 1000),
    "tatoeba": lambda: by_method("own/tatoeba_deen/de-en", *BLEU, 1000, 2000),
    "60l": lambda: by_method("multi30k/de-en", *BLEU, 500, 1000, 1500, 2000),
    "language-model": lambda: by_method("lm-demo", "perplexity", "perplexity, test"),
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
    for path in map(Path, sys.argv[1:]):
        text = path.read_text(encoding="utf-8")
        if (written := write_tables(text)) != text:
            with replacing(path) as part:
                part.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    run(main)
