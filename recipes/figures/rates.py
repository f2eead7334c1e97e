"""The loss against the learning rate: where a scheme learns is its window.

Of make compare there is a panel a scheme, at the largest depth, with Admin, Post-LN and Pre-LN in each to compare with;
of another grid a panel a scheme and optimizer, with a line for each value of the grid's other axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipes.compare.outcome import EXPLODED, last, loss
from recipes.compare.rows import TITLES, Row, axes, grouped, values
from recipes.figures.drawing import ALWAYS, BITS, COLOURS, loss_axes, subplots

COLUMNS = 4
NAMES = {"adam": ", Adam", "sgd": ", SGD", "warmup": "warm-up"}
Lines = dict[str, tuple[dict[str, Any], list[Row]]]
"""By label: how a line looks, and its runs."""


def fill(panel: Axes, lines: Lines, measure: Callable[[Row], float]) -> None:
    """The means over the seeds, and each of them; with a cross where one diverged."""
    rates = values([row for _, runs in lines.values() for row in runs], "lr", float)
    for label, (look, runs) in lines.items():
        means = {rates.index(rate): fmean(map(measure, same)) for (rate,), same in grouped(runs, "lr").items()}
        panel.plot(*zip(*sorted(means.items())), label=label, zorder=3, **look)
        for row in runs:
            mark = "x" if row["verdict"] == "diverged" else "o"
            panel.plot(rates.index(row["lr"]), measure(row), mark, markersize=4, clip_on=False, zorder=3, **look)
    panel.set_xticks(range(len(rates)), rates)


def by_scheme(rows: Sequence[Row]) -> dict[str, Lines]:
    layers = values(rows, "layers", int)[-1]
    schemes = grouped((row for row in rows if row["layers"] == layers), "scheme")
    known: Lines = {TITLES[it]: ({"color": ALWAYS[it]}, runs) for (it,), runs in schemes.items() if it in ALWAYS}
    panels = {
        TITLES[it]: known | {TITLES[it]: ({"color": "black", "linewidth": 2.0}, runs)}
        for (it,), runs in schemes.items()
        if it not in ALWAYS
    }
    return panels or {f"{layers}L-{layers}L": known}


def by_level(rows: Sequence[Row]) -> dict[str, Lines]:
    (against,) = {*axes(rows[0])} - {"scheme", "lr", "optimizer"}
    levels = values(rows, against, float)
    panels: dict[str, Lines] = {}
    kinds = [name for name in ("scheme", "optimizer") if name in rows[0]]
    for (scheme, *optimizer), runs in grouped(rows, *kinds).items():
        title = TITLES[scheme] + "".join(NAMES[name] for name in optimizer)
        for (level,), same in grouped(runs, against).items():
            colour = COLOURS[levels.index(level) % len(COLOURS)]
            panels.setdefault(title, {})[f"{NAMES.get(against, against)} {level}"] = {"color": colour}, same
    return panels


def draw(rows: Sequence[Row]) -> Figure:
    """Of make compare the loss is a run's outcome, else that of the last validation."""
    compared = "layers" in rows[0]
    panels, measure = (by_scheme(rows), loss) if compared else (by_level(rows), last)
    columns = min(COLUMNS, len(panels))
    height = -(-len(panels) // columns)
    size = max(7.5, 2.3 * columns), max(4.2, 1.8 * height + 1.2)
    figure, drawn = subplots(height, columns, size, sharey=True)
    for panel, (title, lines) in zip(drawn.flat, panels.items()):
        fill(panel, lines, measure)
        panel.set_title(title)
    there = [row for lines in panels.values() for _, runs in lines.values() for row in runs]
    loss_axes(drawn.flat, map(measure, there), rows[0]["entropy"])
    for panel in drawn.flat[len(panels) :]:
        panel.set_visible(False)
    figure.supxlabel("learning rate", fontsize="medium")
    figure.supylabel(BITS, fontsize="medium")
    handles, texts = drawn.flat[0].get_legend_handles_labels()
    shown = [(handle, text) for handle, text in zip(handles, texts) if text not in panels]
    figure.legend(
        *zip(*shown), loc="outside upper center", ncols=len(shown), frameon=False, fontsize="small",
        title=f"lines: means of the seeds, which are dots; crosses: diverged, at {EXPLODED} of the entropy",
    )  # fmt: skip
    return figure
