"""The figures of a grid's rows: the loss by update, the loss by learning rate, the accuracy by new layers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from fairseq_admin.analysis.figure import ALWAYS, COLOURS, few_colours
from recipes.compare.intervals import FEWEST
from recipes.compare.outcome import EXPLODED, PLATEAU, last, loss
from recipes.compare.ranking import Measure, accuracy, rankings
from recipes.compare.rows import TITLES, Row, depths_of, grouped, places_of, sizes, values
from recipes.steps.common import replacing

MARKERS = dict(zip(ALWAYS, "osD"))
STYLES = ("-", "--", ":", "-.")
BITS = "bits per token, validation"
NAMES = {"radam": ", RAdam", "adam": ", Adam", "sgd": ", SGD", "warmup": "warm-up", "beta2": "β2"}
Lines = dict[str, tuple[dict[str, Any], list[Row]]]
"""By label: how a line looks, and its runs."""


def looks(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """How the schemes of some rows are drawn, in the order of TITLES."""
    there = {row["scheme"] for row in rows}
    schemes = [name for name in TITLES if name in there]
    drawn = zip((name for name in schemes if name not in ALWAYS), itertools.product(STYLES, COLOURS))
    every = {name: ("-", colour) for name, colour in ALWAYS.items()} | dict(drawn)
    return {name: dict(zip(("linestyle", "color"), every[name])) for name in schemes}


def subplots(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Figure, Any]:
    """A figure and its panels. Shape (rows, columns)."""
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def loss_axes(panels: Iterable[Axes], losses: Iterable[float], entropy: float) -> None:
    """Give panels a logarithmic axis of losses, which shows how far apart the low ones are, with its landmarks.

    It begins a little below the lowest and ends a little above the highest, or the plateau's bound.

    Args:
        losses: those that are shown; one that has exploded says no more than that.
    """
    bound = PLATEAU * entropy
    known = [bits for bits in losses if 0 < bits]
    low, top = 0.95 * min([bound, *known]), 1.05 * min(max([bound, *known]), EXPLODED * entropy)
    landmarks = (entropy, ":", "entropy of a token"), (bound, "--", f"plateau ({PLATEAU} of the entropy)")
    for axes in panels:
        for level, style, label in landmarks:
            if level < top:
                axes.axhline(level, color="grey", linewidth=0.8, linestyle=style, label=label)
        axes.set(yscale="log", ylim=(low, top))
        axes.yaxis.set_major_locator(LogLocator(subs=range(1, 10) if top < 10 * low else (1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")


def save(figure: Figure, path: Path, dpi: int = 130) -> None:
    """Write a PNG, whole or not at all."""
    with replacing(path) as part:
        figure.savefig(part, format="png", dpi=dpi)
        few_colours(part)


def draw_runs(axes: Axes, runs: Sequence[Row], label: str, **look: Any) -> None:
    """The runs of a scheme at a rate: thin lines are seeds, thick ones their mean, or the seeds if they are few."""
    curves = [row["valid"] for row in runs]
    for row in runs:
        axes.plot(*zip(*row["valid"].items()), linewidth=0.6, alpha=0.5, **look)
        if row["verdict"] == "diverged":
            axes.plot(row["update"], 0.98, "x", color=look["color"], transform=axes.get_xaxis_transform())
    if len(curves) >= FEWEST:
        means = {at: fmean(curve[at] for curve in curves) for at in sorted(set.intersection(*map(set, curves)))}
        curves = [{update: bits for update, bits in means.items() if math.isfinite(bits)}]
    for thick in curves:
        axes.plot(list(thick), list(thick.values()), linewidth=1.6, label=label, **look)
        label = ""


def draw_curves(rows: Sequence[Row]) -> Figure:
    """The losses of each scheme at its best rate, and dotted at those that are as good; a panel a depth."""
    drawn, depths = looks(rows), depths_of(rows)
    figure, ((*panels,),) = subplots(1, len(depths), (4.2 * len(depths) + 2.6, 4.6), sharey=True)
    losses = []
    for ranking in sorted(rankings(rows), key=lambda ranking: [*drawn].index(ranking.scheme)):
        for rate in (ranking.best, *ranking.as_good):
            runs = list(ranking.runs[rate].values())
            label = f"{TITLES[ranking.scheme]}, {rate}{' (one seed)' if len(runs) == 1 else ''}"
            look = drawn[ranking.scheme] | ({} if rate == ranking.best else {"linestyle": (0, (1, 1))})
            draw_runs(panels[depths.index(ranking.layers)], runs, label, **look)
            losses += [bits for row in runs for bits in row["valid"].values() if bits < math.inf]
    loss_axes(panels, losses, rows[0]["entropy"])
    for axes, depth in zip(panels, depths):
        axes.set(title=f"{sizes(depth)} (thin: seeds, thick: mean of three or more)", xlabel="updates")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False, fontsize="small")
    panels[0].set_ylabel(BITS)
    return figure


def fill(panel: Axes, lines: Lines, measure: Measure) -> None:
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
    """Of make compare a panel a scheme, at the largest depth, each with Admin, Post-LN and Pre-LN to compare with."""
    layers = depths_of(rows)[-1]
    schemes = grouped((row for row in rows if row["layers"] == layers), "scheme")
    known: Lines = {TITLES[key]: ({"color": ALWAYS[key]}, runs) for (key,), runs in schemes.items() if key in ALWAYS}
    panels = {
        TITLES[key]: known | {TITLES[key]: ({"color": "black", "linewidth": 2.0}, runs)}
        for (key,), runs in schemes.items()
        if key not in ALWAYS
    }
    return panels or {sizes(layers): known}


def by_level(rows: Sequence[Row]) -> dict[str, Lines]:
    """Of another grid a panel an optimizer and scheme, with a line for each value of the grid's other axis."""
    (against,) = {*places_of(rows[0])} - {"scheme", "lr", "optimizer"}
    levels = values(rows, against, float)
    panels: dict[str, Lines] = {}
    kinds = [name for name in ("scheme", "optimizer") if name in rows[0]]
    by_optimizer = sorted(rows, key=lambda row: str(row.get("optimizer")))
    for (scheme, *optimizer), runs in grouped(by_optimizer, *kinds).items():
        title = TITLES[scheme] + "".join(NAMES[name] for name in optimizer)
        for (level,), same in grouped(runs, against).items():
            colour = COLOURS[levels.index(level) % len(COLOURS)]
            panels.setdefault(title, {})[f"{NAMES.get(against, against)} {level}"] = {"color": colour}, same
    return panels


def draw_rates(rows: Sequence[Row]) -> Figure:
    """The loss against the learning rate. Of make compare it is a run's outcome, else that of the last validation."""
    panels, measure = (by_scheme(rows), loss) if "layers" in rows[0] else (by_level(rows), last)
    columns = min(4 if "layers" in rows[0] else 3, len(panels))
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


def draw_accuracies(rows: Sequence[Row]) -> Figure:
    """Of make deeper the schemes next to each other at each depth: the mean, and the seeds to its right."""
    depths, schemes = depths_of(rows), looks(rows)
    figure, ((axes,),) = subplots(1, 1, (7.5, 4))
    for ranking in rankings(rows):
        scheme, seeds = ranking.scheme, list(map(accuracy, ranking.at_best.values()))
        look = {"color": schemes[scheme]["color"], "clip_on": False}
        beside = 0.0 if ranking.layers == "0" else ([*schemes].index(scheme) - len(schemes) / 2) / (len(schemes) + 2)
        place = depths.index(ranking.layers) + beside
        label = TITLES[scheme] if ranking.layers in ("0", depths[-1]) else ""
        axes.plot([place], [fmean(seeds)], "o", markersize=7, label=label, **look)
        axes.plot([place + 0.04] * len(seeds), seeds, ".", markersize=4, alpha=0.6, **look)
    axes.axhline(0.5, color="grey", linewidth=0.8, linestyle=":", label="chance")
    axes.set_xticks(range(len(depths)), ["head alone" if depth == "0" else f"{depth} new layers" for depth in depths])
    axes.set(ylabel="accuracy, test", title="large: mean of the seeds (small) at the best rate")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    return figure
