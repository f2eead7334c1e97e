"""The first figure of README.md: loss against updates in `make demo` with METHOD=admin, post-ln and pre-ln."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from recipes.figures.drawing import ALWAYS, MARKERS, subplots
from recipes.steps.plugin import SCHEMES
from recipes.steps.summary import Run, finished_runs

TITLES = {SCHEMES[scheme].title: scheme for scheme in ALWAYS}
APART = 1.4
"""Bits from one label to the next, at least."""


def demo_runs(runs: Path) -> list[Run]:
    """The demo's three runs.

    Raises:
        ValueError: one has not been run to its score.
    """
    finished = {run.name: run for run in finished_runs(runs / "demo/admin-cpu-s1")}
    if missing := [name for name in TITLES if name not in finished]:
        commands = "; ".join(f"make demo METHOD={TITLES[name]}" for name in missing)
        raise ValueError(f"{runs}/demo: found no score of {' and '.join(missing)}; run {commands} first.")
    return [finished[name] for name in TITLES]


def draw(runs: Sequence[Run]) -> Figure:
    """Each curve is labelled at its end, or above that, where the labels would overlap."""
    figure, ((axes,),) = subplots(1, 1, (8, 4))
    free = 0.0
    for run in sorted(runs, key=lambda run: run.log.valid[max(run.log.valid)]):
        scheme, valid = TITLES[run.name], run.log.valid
        end, colour = valid[max(valid)], ALWAYS[scheme]
        axes.plot(*zip(*run.log.train.items()), color=colour, alpha=0.35, linewidth=1)
        axes.plot(*zip(*valid.items()), MARKERS[scheme], markersize=4, color=colour, clip_on=False)
        text, place = f"{run.name}\n{end:.2f} bits, BLEU {float(run.score['score']):.1f}", max(end, free)
        axes.text(1.02, place, text, transform=axes.get_yaxis_transform(), color=colour, va="center", fontweight="bold")
        free = place + APART
    axes.set(xlabel="updates", ylabel="loss, bits per token", xlim=(0, max(run.log.updates for run in runs)))
    axes.set(ylim=(0, None))
    axes.set_title("lines: training, dots: validation", loc="left", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    return figure
