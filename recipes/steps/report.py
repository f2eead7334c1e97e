"""All results so far next to the papers' numbers: `make table`.

    python -m recipes.steps.report runs

writes, by runs/results.csv, runs/table.md and runs/table.csv, and prints the first. A row holds every run of a recipe
and method with the same preset. The papers' BLEU is tokenised BLEU, so compare it with that column.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from pathlib import Path

from recipes.compare.rows import write_table
from recipes.steps.common import run
from recipes.steps.results import papers, read


def spread(rows: list[dict[str, str]], column: str) -> str:
    """The mean over the seeds, with the standard deviation where there are several; empty without the column."""
    values = [float(row[column]) for row in rows if row[column]]
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}" if values else ""


def each(rows: list[dict[str, str]], column: str) -> str:
    """The values of a column, each once."""
    return ", ".join(dict.fromkeys(row[column] for row in rows))


def lines(results: list[dict[str, str]], papers: list[dict[str, str]]) -> list[dict[str, str]]:
    """A line for each recipe, method and preset, in the papers' order; a paper's number without a run has one too."""
    known = {(row["recipe"], row["method"]): row["bleu"] for row in papers}
    groups: dict[tuple[str, str, str], list[dict[str, str]]] = defaultdict(list)
    for row in results:
        groups[row["recipe"], row["method"], row["preset"]].append(row)
    order = list(dict.fromkeys([*(recipe for recipe, _ in known), *sorted(recipe for recipe, _, _ in groups)]))
    keys = [*groups, *((*key, "") for key in known if not any(group[:2] == key for group in groups))]
    table = []
    for key in sorted(keys, key=lambda key: order.index(key[0])):
        rows = groups.get(key, [])
        # A small run is not an attempt at the paper's number.
        paper = known.get(key[:2], "") if key[2] in ("", "paper") else ""
        seeds = ", ".join(sorted((row["seed"] for row in rows), key=lambda seed: (len(seed), seed)))
        table.append(
            {
                **dict(zip(("recipe", "method", "preset"), key)),
                "seeds": seeds,
                "tokenised BLEU": spread(rows, "tokenised"),
                "paper": paper,
                "sacreBLEU": spread(rows, "score"),
                "compound BLEU": spread(rows, "compound"),
                "perplexity": spread(rows, "perplexity"),
                "epochs": each(rows, "epochs"),
                "updates": each(rows, "updates"),
                "tokens an update": each(rows, "tokens"),
                "parameters": each(rows, "params"),
                "hours": spread(rows, "hours"),
                "hardware": each(rows, "hardware"),
                "commit": each(rows, "commit"),
            }
        )
    return table


def main() -> None:
    runs = Path(*sys.argv[1:])
    results = read(runs / "results.csv")
    table = lines(results, papers())
    signatures = sorted({row[name] for row in results for name in row if name.endswith("signature") and row[name]})
    sources = "; ".join(sorted({row["source"] for row in papers()}))
    notes = [f"Papers: {sources}. BLEU of tokens; several seeds: mean and standard deviation."]
    notes += [f"Signature: `{signature}`" for signature in signatures]
    shown = [{name: cell.replace("|", "/") for name, cell in row.items()} for row in table]
    write_table(runs / "table", table, notes, shown)
    print((runs / "table.md").read_text(encoding="utf-8"), end="")


if __name__ == "__main__":
    run(main)
