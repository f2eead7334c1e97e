"""How the classifiers of `make deeper` came out: each scheme at its best rate.

    python -m recipes.deeper.summary OUT OUT/*/result.json

writes OUT/runs.csv, a row a run, and OUT/table.md and OUT/table.csv, a row a scheme and depth:

    best rate       the most accurate on validation, with the first seed; `edge`: no rate beyond it was tried
    accuracy, test  of every seed at that rate
    vs.             the difference to another scheme at the same depth, seed by seed, and what it shows

Intervals and what a difference shows: recipes/compare/standing.py. A run that diverged counts as a guess.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from recipes.compare.grid_table import ALONE, made_by, write_csv
from recipes.compare.outcomes import LEVEL, told
from recipes.compare.standing import difference, markdown, rate, shown
from recipes.deeper.standing import accuracy, at_best_rates, read_results
from recipes.steps.common import run, write_lines
from recipes.steps.logs import read_log
from recipes.steps.plugin import EVERY

BASES = ("dt-fixup", "admin", "post-ln")


def title(scheme: str) -> str:
    return "head alone" if scheme == ALONE else EVERY[scheme].title


def rows(results: list[dict]) -> list[dict[str, str]]:
    them = at_best_rates(results)
    places = {(it.scheme, it.layers): it for it in them}
    found = []
    for it in them:
        runs = list(it.at_best.values())
        row = {"scheme": it.scheme, "new layers": it.layers, "best rate": rate(it.best, list(it.runs))}
        row["diverged"] = f"{sum(run['diverged'] for run in runs)} of {len(runs)}"
        row["accuracy, test"] = told(list(map(accuracy, runs)), ".3f")
        for base in BASES:
            other = places.get((base, it.layers))
            column = f"vs. {title(base)}"
            row[column] = shown(difference(it, other, accuracy), "+.3f", False) if other and other is not it else ""
        found.append(row)
    return found


def notes(results: list[dict], encoder: Path) -> Iterable[str]:
    """What holds for the whole table."""
    valid = read_log(encoder).valid
    rates = sorted({result["lr"] for result in results}, key=float)
    yield ""
    yield (
        f"Each at its best of the rates {', '.join(rates)}; brackets: Student's t over the seeds, {LEVEL:.0%}. What "
        "the columns are: recipes/deeper/summary.py."
    )
    yield f"The encoder needs {valid[max(valid)]:.3f} bits a masked word on validation, after {max(valid)} updates."
    yield made_by(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("results", type=Path, nargs="+")
    args = parser.parse_args()
    results = read_results(args.results)
    table = rows(results)
    write_csv(args.folder / "runs.csv", results)
    write_csv(args.folder / "table.csv", table)
    write_lines(args.folder / "table.md", [*markdown(table, title), *notes(results, args.folder / "encoder/train.log")])


if __name__ == "__main__":
    run(main)
