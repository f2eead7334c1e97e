"""All results so far next to the papers' numbers: `make table`.

    python -m recipes.results_table runs

reads runs/results.csv, writes runs/table.md and runs/table.csv, and prints table.md. A row summarises all runs that
differ only in the seed. The papers report tokenised BLEU, so compare them with that column.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from recipes.steps.common import run
from recipes.steps.results import KEY, grouped, is_attempt, papers, read, write_table

COLUMNS = {
    "tokenised BLEU": "tokenised", "sacreBLEU": "score", "chrF2": "chrf", "compound BLEU": "compound",
    "perplexity": "perplexity", "epochs": "epochs", "updates": "updates", "tokens an update": "tokens",
    "parameters": "params", "hours": "hours", "hardware": "hardware", "commit": "commit",
}  # fmt: skip
"""The columns of the table, with their columns in results.csv."""
MEASURED = ("tokenised", "score", "chrf", "compound", "perplexity", "hours")


def cell(rows: list[dict[str, str]], column: str) -> str:
    """The different values of a column. If it is a measurement, the mean over the seeds and the standard deviation."""
    values = [row[column] for row in rows if row[column]]
    if column not in MEASURED or not values:
        return ", ".join(dict.fromkeys(values))
    numbers = list(map(float, values))
    deviation = f" ± {statistics.stdev(numbers):.2f}" if len(numbers) > 1 else ""
    return f"{statistics.mean(numbers):.2f}{deviation}"


def lines(results: list[dict[str, str]], papers: list[dict[str, str]]) -> list[dict[str, str]]:
    """A row for all runs that differ only in the seed, in the papers' order.

    A paper's number has a row even if no run belongs to it.
    """
    known = {(row["recipe"], row["method"]): row["bleu"] for row in papers}
    groups: dict[tuple[str, ...], list[dict[str, str]]] = grouped(results, *KEY[:-1])
    groups |= {(*key, "", "", ""): [] for key in known if not any(group[:2] == key for group in groups)}
    order = list(dict.fromkeys([*(recipe for recipe, _ in known), *sorted(key[0] for key in groups)]))
    table = []
    for key, rows in sorted(groups.items(), key=lambda item: order.index(item[0][0])):
        row = dict(zip(KEY, key))
        row["seeds"] = ", ".join(sorted((row["seed"] for row in rows), key=int))
        row["tokenised BLEU"] = cell(rows, "tokenised")
        row["paper"] = known.get((row["recipe"], row["method"]), "") if is_attempt(row) else ""
        table.append(row | {title: cell(rows, column) for title, column in COLUMNS.items()})
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
