"""All results so far next to the papers' numbers: `make table`.

    python -m recipes.steps.report runs/results.csv -o runs/table

writes runs/table.md and runs/table.csv, and prints the first. A row holds every run of a recipe and method with the
same preset. The papers' BLEU is tokenised BLEU, so compare it with that column.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tabulate import tabulate

from recipes.steps.common import replacing, run, write_lines
from recipes.steps.results import papers, read

HEAD = (
    *("recipe", "method", "preset", "seeds", "tokenised BLEU", "paper", "sacreBLEU", "compound BLEU", "perplexity"),
    *("epochs", "updates", "tokens an update", "parameters", "hours", "hardware", "commit"),
)


def spread(rows: list[dict[str, str]], column: str) -> str:
    """The mean over the seeds, with the standard deviation where there are several; empty without the column."""
    values = [float(row[column]) for row in rows if row[column]]
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}" if values else ""


def each(rows: list[dict[str, str]], column: str) -> str:
    """The values of a column, each once."""
    return ", ".join(dict.fromkeys(row[column] for row in rows))


def lines(results: list[dict[str, str]], papers: list[dict[str, str]]) -> list[tuple[str, ...]]:
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
        scores = (spread(rows, name) for name in ("score", "compound", "perplexity"))
        rest = (each(rows, name) for name in ("epochs", "updates", "tokens", "params"))
        made = (spread(rows, "hours"), each(rows, "hardware"), each(rows, "commit"))
        table.append((*key, seeds, spread(rows, "tokenised"), paper, *scores, *rest, *made))
    return table


def markdown(table: Iterable[tuple[str, ...]]) -> list[str]:
    rows = [[cell.replace("|", "/") for cell in row] for row in table]
    return tabulate(rows, HEAD, tablefmt="github", disable_numparse=True).splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, help="results.csv")
    parser.add_argument("-o", "--out", type=Path, required=True, help="where to write, without .md and .csv")
    args = parser.parse_args()

    results = read(args.results)
    table = lines(results, papers())
    signatures = sorted({row[name] for row in results for name in row if name.endswith("signature") and row[name]})
    sources = "; ".join(sorted({row["source"] for row in papers()}))
    text = [*markdown(table), "", f"Papers: {sources}. BLEU of tokens; several seeds: mean and standard deviation."]
    text += [f"Signature: `{signature}`" for signature in signatures]
    with replacing(args.out.with_suffix(".csv")) as part, part.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([HEAD, *table])
    write_lines(args.out.with_suffix(".md"), text)
    print("\n".join(text))


if __name__ == "__main__":
    run(main)
