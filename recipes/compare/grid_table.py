"""Gather a grid's results: how the runs at each place in it came out, over the seeds.

    python -m recipes.compare.grid_table RUN RUN/*/result.json --by scheme layers

writes RUN/runs.csv, a row per run with its curve on validation, and RUN/table.csv and RUN/table.md, a row per place in
the grid.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from recipes.compare import outcomes
from recipes.compare.verdict import EXPLODED, PLATEAU, VERDICTS
from recipes.steps.common import Kinds, check_rate, read_lines, read_object, replacing, run, write_lines
from recipes.steps.logs import as_cell, from_cell
from recipes.steps.plugin import EVERY

AXES = ("scheme", "layers", "lr", "seed")
"""Where a run of make compare is in its grid."""
ALONE = "none"
"""The scheme of a head without new layers, in make deeper."""

PERHAPS = (int, float, type(None))
KINDS: Kinds = {
    **{"verdict": str, "update": (int, type(None)), "bits": PERHAPS, "left": PERHAPS, "entropy": float},
    **{"bleu": PERHAPS, "signature": (str, type(None)), "params": int, "seconds": int, "train": dict, "valid": dict},
    **{"hardware": str, "commit": str},
}
"""What a result.json holds besides its axes; a runs.csv has no curves of training."""


def read_results(paths: list[Path], axes: Sequence[str] = AXES, kinds: Kinds = KINDS) -> list[dict]:
    """The results of a grid's cells, as they wrote them, with curves by update; or those of a runs.csv.

    Args:
        axes: where in the grid a result is, each a word.
        kinds: what else it holds.

    Raises:
        ValueError: a file is none of those, of another grid, or damaged; the message names it, and a table's row.
    """
    results = read_runs(paths[0], kinds) if [path.suffix for path in paths] == [".csv"] else []
    for path in [] if results else paths:
        result = read_object(path, kinds, "the result.json of a grid's cell. Give that")
        try:
            for name in [name for name, kind in kinds.items() if kind is dict]:
                result[name] = {int(updates): float(bits) for updates, bits in result[name].items()}
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: cannot be read ({error}); expected the result.json of a grid's cell.") from None
        results.append(result)
    for path, result in zip(paths * len(results) if len(paths) == 1 else paths, results):
        if missing := [name for name in axes if not isinstance(result.get(name), str)]:
            raise ValueError(
                f"{path}: has no {missing[0]}; expected results of a grid of {', '.join(axes)}. Give those."
            )
        for name, known in (("scheme", (*EVERY, ALONE)), ("verdict", VERDICTS)):
            if name in result and result[name] not in known:
                raise ValueError(f"{path}: its {name} is {result[name]}; expected one of {', '.join(known)}.")
        if "lr" in result:
            check_rate(path, result["lr"])
    return results


def read_runs(path: Path, kinds: Kinds = KINDS) -> list[dict]:
    """The results in a runs.csv.

    Raises:
        ValueError: a column is missing, or a row is cut short or has something else for a number.
    """
    rows: list[dict] = list(csv.DictReader(line.rstrip("\r") for line in read_lines(path)))
    columns = {name: kind for name, kind in kinds.items() if name != "train"}
    if missing := [name for name in columns if not rows or name not in rows[0]]:
        raise ValueError(f"{path}: has no column {missing[0]}; expected the runs.csv of a grid. Give that.")
    for number, row in enumerate(rows, start=1):
        if None in row or None in row.values():
            raise ValueError(f"{path}: row {number} has other columns than the first line names. Fix it.")
        try:
            row |= {name: from_csv(row[name], kind) for name, kind in columns.items()}
        except ValueError as error:
            raise ValueError(f"{path}: row {number}: {error}; expected a number. Fix it.") from None
    return rows


def from_csv(text: str, kind: type | tuple[type, ...]) -> Any:
    """What a cell of a table holds."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not text and type(None) in kinds:
        return None
    if dict in kinds:
        return from_cell(text)
    if bool in kinds:
        return text == "True"
    return float(text) if float in kinds else int(text) if int in kinds else text


def places(results: list[dict], axes: list[str]) -> dict[tuple[str, ...], list[dict]]:
    """The results by their place in the grid, in order of appearance."""
    found: dict[tuple[str, ...], list[dict]] = {}
    for result in results:
        found.setdefault(tuple(result[axis] for axis in axes), []).append(result)
    return found


def outcome(results: list[dict]) -> str:
    """As in "2 learned, 1 diverged (update 130)"."""
    parts = []
    for kind in ("learned", "plateau", "diverged"):
        updates = [result["update"] for result in results if result["verdict"] == kind]
        if updates:
            at = f" (update {', '.join(map(str, updates))})" if kind == "diverged" else ""
            parts.append(f"{len(updates)} {kind}{at}")
    return ", ".join(parts)


def spread(values: list[float | None], digits: int) -> str:
    """Mean and range, of the runs that have a finite value."""
    found = [value for value in values if value is not None and math.isfinite(value)]
    if not found:
        return "-"
    mean = f"{sum(found) / len(found):.{digits}f}"
    return mean if len(found) == 1 else f"{mean} ({min(found):.{digits}f} to {max(found):.{digits}f})"


def rows(results: list[dict], axes: list[str]) -> list[dict[str, str]]:
    return [
        {
            **dict(zip(axes, place)),
            "runs": str(len(found)),
            "outcome": outcome(found),
            "bits, valid": spread([outcomes.outcome(result["valid"]) for result in found], 3),
            "BLEU": spread([result["bleu"] for result in found], 2),
        }
        for place, found in places(results, axes).items()
    ]


def write_csv(path: Path, table: list[dict]) -> None:
    with replacing(path) as part, part.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, table[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


def write_runs(path: Path, results: list[dict]) -> None:
    """The results as a runs.csv: validation's curve is one cell."""
    rows = []
    for result in results:
        kept = {name: value for name, value in result.items() if name != "train"}
        rows.append({**kept, "valid": as_cell(result["valid"])})
    write_csv(path, rows)


def made_by(results: list[dict]) -> str:
    """Which code made the results, on what, and how long it took."""
    commits, machines = (", ".join(sorted({result[name] for result in results})) for name in ("commit", "hardware"))
    hours = sum(result["seconds"] for result in results) / 3600
    return f"Commit {commits}; {machines}; {hours:.2f} hours of updates in {len(results)} runs."


def notes(results: list[dict]) -> list[str]:
    """What holds for the whole table."""
    entropy = ", ".join(sorted({f"{result['entropy']:.3f}" for result in results}))
    signatures = sorted({result["signature"] for result in results if result["signature"]})
    return [
        "",
        f"Bits: of a run the mean of its last {outcomes.LAST} validations. Mean over the seeds, and the range. "
        f"One target token has an entropy of {entropy} bits: above {PLATEAU} of it "
        f"a run is on the plateau, above {EXPLODED} of it, or no longer finite, diverged (recipes/compare/verdict.py).",
        *(f"BLEU: {signature}" for signature in signatures),
        made_by(results),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--by", nargs="+", required=True, help="the axes of the grid, except the seed")
    args = parser.parse_args()
    results = read_results(args.results, ["seed", *args.by])
    table = rows(results, args.by)
    write_runs(args.folder / "runs.csv", results)
    write_csv(args.folder / "table.csv", table)
    lines = tabulate(table, headers="keys", tablefmt="github", disable_numparse=True).splitlines()
    write_lines(args.folder / "table.md", [*lines, *notes(results)])


if __name__ == "__main__":
    run(main)
