"""Public reports of models that do not train, as small models of our own: the table of docs/cases.md, from its rows.

    python -m recipes.research.cases

Commit 83c3ee4a has the program that made the rows, docs/examples/cases.py, with the five models and their data; a row
names the commit at which it was made.
"""

from __future__ import annotations

from recipes.research.omega_screen import DOCS, Row, load
from recipes.steps.results import grouped

METHODS = ["stock", "reference", "log", "constant", "pre-ln"]
LEARNS = 0.9  # of the plateau's loss, at most


def table(rows: list[Row]) -> str:
    """Losses of each seed by case and method, in bold if all of them learn; then each advice, with cases and seeds."""
    methods = [*METHODS, "advice"]
    lines = ["| case (plateau) | " + " | ".join(methods) + " |", "|---" * (len(methods) + 1) + "|"]
    for (case,), runs in grouped(rows, "case").items():
        plateau, cells = next(float(row["plateau"]) for row in runs if row["method"] != "diagnose"), []
        for method in methods:
            values = [float(row["loss"]) for row in runs if row["method"] == method]
            text = ", ".join(f"{value:.2f}" for value in values)
            cells.append(f"**{text}**" if values and max(values) <= LEARNS * plateau else text)
        lines.append(f"| {case} ({plateau:.2f}) | {' | '.join(cells)} |")
    lines.append("")
    for (advice,), runs in grouped((row for row in rows if row["method"] == "diagnose"), "advice").items():
        cases = grouped(runs, "case").items()
        seeds = "; ".join(f"{case}, seed {', '.join(row['seed'] for row in same)}" for (case,), same in cases)
        lines.append(f"- {advice} ({seeds})")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(load(DOCS / "rows/cases.csv")))
