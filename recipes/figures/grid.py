"""The tables and figures of a grid, in its folder.

runs.csv has a row for each run; table.csv and table.md compare the schemes (recipes/compare/ranking.py). rates.png
shows losses by rate, curves.png (make compare) losses by update, accuracy.png (make deeper) accuracies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from recipes.compare import ranking
from recipes.compare.intervals import LEVEL
from recipes.compare.outcome import LAST, PLATEAU
from recipes.compare.rows import Row, titled, values, write_runs, write_table
from recipes.figures.drawing import draw_accuracies, draw_curves, draw_rates, save


def notes(rows: Sequence[Row]) -> Iterator[str]:
    """The notes below a table."""
    yield f"Columns: recipes/compare/ranking.py. Brackets: Student's t over the seeds, {LEVEL:.0%}."
    if "entropy" in rows[0]:
        entropy = ", ".join(sorted({f"{row['entropy']:.3f}" for row in rows}))
        yield (
            f"Bits: the mean of a run's last {LAST} validations. A token has an entropy of {entropy} bits; a run "
            f"learned if its last validation is below {PLATEAU} of that (recipes/compare/outcome.py)."
        )
        yield from (f"BLEU: {text}" for text in values((row for row in rows if row["signature"]), "signature"))
    code, machines = (", ".join(values(rows, name)) for name in ("commit", "hardware"))
    hours = sum(row["seconds"] for row in rows) / 3600
    yield f"Commit {code}; {machines}; {hours:.2f} hours of updates in {len(rows)} runs."


def write(folder: Path, rows: Sequence[Row]) -> None:
    """Write all tables and figures."""
    write_runs(folder / "runs.csv", rows)
    table = ranking.table(rows) if "layers" in rows[0] else ranking.learning(rows)
    write_table(folder / "table", titled(table), notes(rows))
    if "diverged" in rows[0]:
        save(draw_accuracies(rows), folder / "accuracy.png")
        return
    save(draw_rates(rows), folder / "rates.png")
    if "layers" in rows[0]:
        save(draw_curves(rows), folder / "curves.png")
