"""A run's log, refused if it is not whole; and a curve in a cell of a table."""

from __future__ import annotations

from pathlib import Path

from fairseq_admin.logs import Log, read
from recipes.steps.common import read_lines


def read_log(path: str | Path, unfinished: bool = False) -> Log:
    """Read a run's log.

    Args:
        unfinished: also take a run that ended before its first training interval or validation.

    Raises:
        ValueError: the log is missing, or has no training interval, no validation or no parameter count.
    """
    log = read(read_lines(path))
    if not (log.params and (unfinished or (log.train and log.valid))):
        raise ValueError(
            f"{path}: found {len(log.train)} training intervals, {len(log.valid)} validations and "
            f"{'a' if log.params else 'no'} parameter count; expected at least one of each. "
            "Is it the log of fairseq-train --log-format json? Remove the run's folder and train again."
        )
    return log


def as_cell(losses: dict[int, float]) -> str:
    """A curve as one cell of a table, as in `100:5.752 250:2.003`: bits by update."""
    return " ".join(f"{update}:{bits:.4g}" for update, bits in sorted(losses.items()))


def from_cell(text: str) -> dict[int, float]:
    """The curve in such a cell.

    Raises:
        ValueError: it is something else.
    """
    points = (point.split(":") for point in text.split())
    return {int(update): float(bits) for update, bits in points}
