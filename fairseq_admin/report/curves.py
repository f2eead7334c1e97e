"""Training and validation perplexity of several runs, from fairseq's logs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import logs
from ..analysis import figure
from ..errors import AdminError


def names(folders: Sequence[Path]) -> list[str]:
    """Name each run by the last parts of its path, with as few parts as tell all runs apart.

    Args:
        folders: the folders of the runs.

    Returns:
        The names of the runs.

    Raises:
        AdminError: a folder is given twice.
    """
    whole = [folder.resolve() for folder in folders]
    if twice := next((path for path in whole if whole.count(path) > 1), None):
        raise AdminError(f"{twice} was given more than once; each run counts once. Give it once.")
    depths = range(1, max(len(path.parts) for path in whole) + 1)
    shortened = (["/".join(path.parts[-depth:]) for path in whole] for depth in depths)
    return next(short for short in shortened if len(set(short)) == len(short))


def log_of(folder: Path) -> logs.Log | None:
    """Read a run's log: train.log, or the only *.log or *log.txt.

    Args:
        folder: the folder of the run.

    Returns:
        The log. None: there is no log.

    Raises:
        AdminError: it is not a folder; it has several logs; or its log has no losses.
    """
    if not folder.is_dir():
        raise AdminError(f"{folder} is not a folder; a run's was expected: a recipe's, or fairseq-train's --save-dir.")
    paths = [folder / "train.log"]
    if not paths[0].exists():
        paths = sorted({*folder.glob("*.log"), *folder.glob("*log.txt")})
    if len(paths) > 1:
        raise AdminError(f"{folder} has several logs ({', '.join(path.name for path in paths)}); name one train.log.")
    if not paths:
        return None
    log = logs.read_log(paths[0])
    if not log.train and not log.valid:
        raise AdminError(
            f"{paths[0]} holds no losses; the log of fairseq-train was expected, with --log-format json or simple and "
            "a --log-interval that the run reaches. Move it away to do without."
        )
    return log


def draw(runs: Mapping[str, logs.Log], looks: Mapping[str, dict[str, Any]]) -> figure.Figure:
    """Draw the perplexities of several runs: a panel for training, a panel for validation.

    Args:
        runs: their logs, by name.
        looks: matplotlib's options for the lines of each run, the same in both panels.

    Returns:
        The figure.
    """
    drawn, panels = figure.panels(2, sharey=True)
    for axes, (part, title) in zip(panels, {"train": "training", "valid": "validation"}.items()):
        for name, log in runs.items():
            losses: dict[int, float] = getattr(log, part)
            values = [logs.perplexity(bits) for bits in losses.values()]
            finite = [value if math.isfinite(value) else math.nan for value in values]
            every = max(1, len(values) // 12)
            axes.plot(list(losses), finite, label=figure.name_as_it_is(name), markevery=every, **looks[name])
        axes.set(title=title, xlabel="updates")
        figure.plain_logarithmic(axes)
    panels[0].set_ylabel("perplexity")
    panels[1].legend()
    return drawn
