"""Training and validation perplexity of several runs, from fairseq's logs (Liu et al. 2020, figures 1 and 9)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import logs
from ..errors import AdminError
from . import figure
from .registry import Settings
from .subject import versions

TAGS = {"train": "training", "valid": "validation"}


def names(folders: Sequence[Path]) -> list[str]:
    """Name runs by the last parts of their paths, as many as tell them apart.

    Raises:
        AdminError: a folder is given twice.
    """
    whole = [folder.resolve() for folder in folders]
    if twice := next((path for path in whole if whole.count(path) > 1), None):
        raise AdminError(f"{twice} was given more than once; each run counts once. Give it once.")
    depths = range(1, max(len(path.parts) for path in whole) + 1)
    shortened = (["/".join(path.parts[-depth:]) for path in whole] for depth in depths)
    return next(short for short in shortened if len(set(short)) == len(short))


def read_log(folder: Path) -> logs.Log | None:
    """Read a run's log: train.log, or else the only *.log or *log.txt. None if there is no log.

    Raises:
        AdminError: it is not a folder, has several logs, or one without losses.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "no such folder"
        raise AdminError(f"{folder}: {what}; a run's folder was expected: a recipe's, or fairseq-train's --save-dir.")
    paths = [folder / "train.log"]
    if not paths[0].exists():
        paths = sorted({*folder.glob("*.log"), *folder.glob("*log.txt")})
    if len(paths) > 1:
        raise AdminError(f"{folder} has several logs ({', '.join(path.name for path in paths)}); name one train.log.")
    if not paths:
        return None
    with paths[0].open(encoding="utf-8", errors="replace") as lines:
        log = logs.parse_log(lines)
    if not log.train and not log.valid:
        raise AdminError(
            f"{paths[0]} holds no losses; the log of fairseq-train was expected, with --log-format json or simple and "
            "a --log-interval that the run reaches. Move it away to do without."
        )
    return log


def no_log(folder: Path) -> str:
    """The message for a run without a log."""
    return (
        f"{folder} has no log: found no train.log; expected the output of fairseq-train. Train with --log-format json "
        f"and 2>&1 | tee {folder}/train.log, or copy the log there."
    )


def of_logs(runs: Mapping[str, logs.Log]) -> dict[str, dict[str, Any]]:
    """The curves of every run: {"train": {"updates": [...], "perplexity": [...]}, "valid": ...}.

    A perplexity that is not finite is None.
    """
    curves: dict[str, dict[str, Any]] = {}
    for name, log in runs.items():
        for tag, losses in (("train", log.train), ("valid", log.valid)):
            values = [logs.perplexity(bits) for bits in losses.values()]
            finite = [value if math.isfinite(value) else None for value in values]
            curves.setdefault(name, {})[tag] = {"updates": list(losses), "perplexity": finite}
    return curves


def measure(folders: Sequence[Path], settings: Settings) -> dict[str, Any]:
    """Measure the curves of runs.

    Raises:
        AdminError: no folder is given, or one has no log.
    """
    if not folders:
        raise AdminError("no folder was given; at least one run's was expected. Give one, or several.")
    read: dict[str, logs.Log] = {}
    for name, folder in zip(names(folders), folders):
        log = read_log(folder)
        if log is None:
            raise AdminError(no_log(folder))
        read[name] = log
    runs = zip(folders, of_logs(read).items())
    return {"versions": versions(), "runs": {name: {"folder": str(folder), **curve} for folder, (name, curve) in runs}}


def draw(result: dict[str, Any], looks: Mapping[str, dict[str, Any]] | None = None) -> figure.Figure:
    """Draw one panel for training and one for validation; a run has the same colour and marker in both.

    Args:
        result: the output of `measure`, or {"runs": `of_logs`}.
        looks: matplotlib's line options by run; None: in the order of the colours.
    """
    looks = looks or {name: figure.style(number) for number, name in enumerate(result["runs"])}
    drawn, panels = figure.panels(len(TAGS), sharey=True)
    for axes, (tag, title) in zip(panels, TAGS.items()):
        for name, run in result["runs"].items():
            values = [math.nan if value is None else value for value in run[tag]["perplexity"]]
            every = max(1, len(values) // 12)
            label = figure.name_as_it_is(name)
            axes.plot(run[tag]["updates"], values, label=label, markevery=every, **looks[name])
        axes.set(title=title, xlabel="updates")
        figure.plain_logarithmic(axes)
    panels[0].set_ylabel("perplexity")
    panels[1].legend()
    return drawn
