"""All results so far next to the papers' numbers: `make table`.

    python -m recipes.figures.results_table runs

reads runs/results.csv, writes runs/table.md and runs/table.csv, and prints table.md. A row summarises all runs with the
same recipe, method, rule and preset. The papers report tokenised BLEU, so compare them with that column.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from recipes.compare.rows import grouped, write_table
from recipes.steps.common import run
from recipes.steps.results import papers, read


def spread(rows: list[dict[str, str]], column: str) -> str:
    """The mean over the seeds, with the standard deviation if there are several; empty if the column is empty."""
    values = [float(row[column]) for row in rows if row[column]]
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}" if values else ""


def each(rows: list[dict[str, str]], column: str) -> str:
    """The different values of a column."""
    return ", ".join(dict.fromkeys(row[column] for row in rows))


COLUMNS = {
    "tokenised BLEU": (spread, "tokenised"), "sacreBLEU": (spread, "score"), "compound BLEU": (spread, "compound"),
    "perplexity": (spread, "perplexity"), "epochs": (each, "epochs"), "updates": (each, "updates"),
    "tokens an update": (each, "tokens"), "parameters": (each, "params"), "hours": (spread, "hours"),
    "hardware": (each, "hardware"), "commit": (each, "commit"),
}  # fmt: skip
"""The columns of the table: the function that makes a cell, and its column in results.csv."""


def lines(results: list[dict[str, str]], papers: list[dict[str, str]]) -> list[dict[str, str]]:
    """Rows by recipe, method, rule and preset, in the papers' order, and for each paper's number without runs."""
    known = {(row["recipe"], row["method"]): row["bleu"] for row in papers}
    groups: dict[tuple[str, ...], list[dict[str, str]]] = grouped(results, "recipe", "method", "rule", "preset")
    order = list(dict.fromkeys([*(recipe for recipe, _ in known), *sorted(key[0] for key in groups)]))
    keys = [*groups, *((*key, "", "") for key in known if not any(group[:2] == key for group in groups))]
    table = []
    for recipe, method, rule, preset in sorted(keys, key=lambda key: order.index(key[0])):
        rows = groups.get((recipe, method, rule, preset), [])
        row = {"recipe": recipe, "method": method, "rule": rule, "preset": preset}
        row["seeds"] = ", ".join(sorted((row["seed"] for row in rows), key=lambda seed: (len(seed), seed)))
        for title, (cell, column) in COLUMNS.items():
            row[title] = cell(rows, column)
            # A small run is not an attempt at the paper's number.
            attempt = preset in ("", "paper") and rule in ("", "reference")
            row.setdefault("paper", known.get((recipe, method), "") if attempt else "")
        table.append(row)
    return table


def main() -> None:
    runs = Path(*sys.argv[1:])
    results = read(runs / "results.csv")
    table = lines(results, papers())
    signatures = sorted({row[name] for row in results for name in row if name.endswith("signature") and row[name]})
    sources = "; ".join(sorted({row["source"] for row in papers()}))
    notes = [f"Papers: {sources}. BLEU of tokens; several seeds: mean and standard deviation."]
    notes += [f"Signature: `{signature}`" for signature in signatures]
    write_table(runs / "table", table, notes)
    print((runs / "table.md").read_text(encoding="utf-8"), end="")


if __name__ == "__main__":
    run(main)
