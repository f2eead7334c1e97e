"""The tables and figures of a grid of runs, in its folder.

runs.csv has a row a run, table.csv and table.md a row a place in the grid, rates.png the losses by rate; of make
compare also standing.csv and standing.md (recipes/compare/ranking.py) and curves.png. Of make deeper table.* is how the
schemes stand, with accuracy.png.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from recipes.compare import ranking
from recipes.compare.intervals import LEVEL, with_range
from recipes.compare.outcome import EXPLODED, LAST, PLATEAU, mean_of_last
from recipes.compare.rows import Row, grouped, places_of, titled, values, write_runs, write_table
from recipes.figures.drawing import draw_accuracies, draw_curves, draw_rates, save
from recipes.steps.results import read_log


def outcome(rows: Sequence[Row]) -> str:
    """As in "2 learned, 1 diverged (update 130)"."""
    parts = []
    for kind in ("learned", "plateau", "diverged"):
        updates = [str(row["update"]) for row in rows if row["verdict"] == kind]
        at = f" (update {', '.join(updates)})" if kind == "diverged" else ""
        parts += [f"{len(updates)} {kind}{at}"] if updates else []
    return ", ".join(parts)


def places(rows: Sequence[Row]) -> list[Row]:
    """A row a place in the grid: how its seeds came out."""
    names = places_of(rows[0])
    table = []
    for place, runs in grouped(rows, *names).items():
        row = {**dict(zip(names, place)), "runs": str(len(runs)), "outcome": outcome(runs)}
        row["bits, valid"] = with_range([mean_of_last(run["valid"]) for run in runs], 3)
        table.append({**row, "BLEU": with_range([run["bleu"] for run in runs], 2)})
    return table


def made_by(rows: Sequence[Row]) -> str:
    """Which code made the rows, on what, and how long it took."""
    code, machines = (", ".join(values(rows, name)) for name in ("commit", "hardware"))
    hours = sum(row["seconds"] for row in rows) / 3600
    return f"Commit {code}; {machines}; {hours:.2f} hours of updates in {len(rows)} runs."


def notes(rows: Sequence[Row]) -> Iterator[str]:
    """What holds for a whole table of translation models."""
    entropy = ", ".join(sorted({f"{row['entropy']:.3f}" for row in rows}))
    yield (
        f"Bits: of a run the mean of its last {LAST} validations. Mean over the seeds, and the range. "
        f"One target token has an entropy of {entropy} bits: above {PLATEAU} of it "
        f"a run is on the plateau, above {EXPLODED} of it, or no longer finite, diverged (recipes/compare/outcome.py)."
    )
    yield from (f"BLEU: {text}" for text in values((row for row in rows if row["signature"]), "signature"))
    yield made_by(rows)


def chosen(rows: Sequence[Row]) -> str:
    """How the rate of a table's row was chosen, and what its brackets are.

    Args:
        rows: those that it was chosen by.
    """
    among = ", ".join(values(rows, "lr", float))
    seeds = set.intersection(*({*values(runs, "seed")} for runs in grouped(rows, "scheme", "layers", "lr").values()))
    on = f", tried on seed {', '.join(sorted(seeds))}" if seeds else ""
    return f"best of the rates {among}{on}; brackets: Student's t over the seeds, {LEVEL:.0%}."


def compared(folder: Path, rows: Sequence[Row], tried: Sequence[Row]) -> None:
    """How the schemes stand, and the figures of that."""
    table = ranking.table(rows, tried)
    rule = f"A loss is the mean of the last {LAST} validations. Each scheme at its {chosen(tried or rows)} "
    if tried:
        updates = max(max(row["valid"], default=0) for row in tried)
        rule += f"The rates, and so the window, were tried in runs of {updates} updates. "
    rule += f"{len(table)} rows are compared at once. What the columns are: recipes/compare/ranking.py."
    write_table(folder / "standing", table, [*notes(rows), rule], titled(table))
    save(draw_curves(rows), folder / "curves.png")


def classified(folder: Path, rows: Sequence[Row]) -> None:
    """How new layers on a pre-trained encoder came out."""
    table, valid = ranking.table_of_accuracies(rows), read_log(folder / "encoder/train.log").valid
    rule = f"Each at its {chosen(rows)} What the columns are: recipes/compare/ranking.py."
    encoder = f"The encoder needs {valid[max(valid)]:.3f} bits a masked word on validation, after {max(valid)} updates."
    write_table(folder / "table", table, [rule, encoder, made_by(rows)], titled(table))
    save(draw_accuracies(rows), folder / "accuracy.png")


def write(folder: Path, rows: Sequence[Row], tried: Sequence[Row] = ()) -> None:
    """All of them.

    Args:
        tried: the short runs that the rates were tried with, if there were any.
    """
    write_runs(folder / "runs.csv", rows)
    if "diverged" in rows[0]:
        classified(folder, rows)
        return
    write_table(folder / "table", places(rows), [*notes(rows)])
    save(draw_rates(tried or rows), folder / "rates.png")
    if "layers" in rows[0]:
        compared(folder, rows, tried)
