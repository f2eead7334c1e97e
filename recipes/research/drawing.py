"""Tables and figures of a grid, in its folder.

runs.csv has a row for each run; table.csv and table.md compare the schemes (recipes/research/ranking.py). rates.png
shows losses by rate, accuracy.png (make deeper) accuracies by the number of new layers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fairseq_admin.analysis.figure import ALWAYS, COLOURS, few_colours, plain_logarithmic
from fairseq_admin.outputs import replacing
from recipes.research.intervals import FEWEST, LEVEL
from recipes.research.outcome import EXPLODED, LAST, PLATEAU, last, loss
from recipes.research.ranking import Measure, accuracy, by_level, learning, rankings, table
from recipes.research.rows import TITLES, Row, depths_of, sizes, titled, values
from recipes.steps.results import grouped, write_runs, write_table

BITS = "bits per token, validation"
Panels = dict[str, dict[str, list[Row]]]
"""Runs by the title of their panel and the label of their line."""
Line = tuple[str, str, Sequence[Row]]
"""The title of a line's panel, its label, and its runs."""


def subplots(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, Any]:
    """A figure and its panels, shape (rows, columns), which share the vertical axis."""
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, sharey=True)


def loss_axes(panels: Iterable[Axes], losses: Iterable[float], entropy: float) -> None:
    """Give panels a logarithmic axis of losses, which separates low losses, and mark the entropy and the plateau.

    The axis begins a little below the lowest loss, and ends a little above the highest loss or the plateau's bound.

    Args:
        losses: the losses in the panels. The axis ends at the loss above which a run has exploded.
    """
    bound = PLATEAU * entropy
    known = [bits for bits in losses if 0 < bits]
    low, top = 0.95 * min([bound, *known]), 1.05 * min(max([bound, *known]), EXPLODED * entropy)
    landmarks = (entropy, ":", "entropy of a token"), (bound, "--", f"plateau ({PLATEAU} of the entropy)")
    for axes in panels:
        for level, style, label in landmarks:
            if level < top:
                axes.axhline(level, color="grey", linewidth=0.8, linestyle=style, label=label)
        plain_logarithmic(axes)
        axes.set_ylim(low, top)


def save(figure: Figure, path: Path, dpi: int = 130) -> None:
    """Write a PNG, completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        figure.savefig(part, format="png", dpi=dpi)
        few_colours(part)


def draw_losses(lines: Sequence[Line], entropy: float) -> Figure:
    """The losses of runs of Admin, Post-LN and Pre-LN, dashed with a rule of omega other than `reference`.

    Seeds are thin lines. Their mean is a thick line, or each seed is if they are few.
    """
    titles = list(dict.fromkeys(title for title, *_ in lines))
    figure, ((*panels,),) = subplots(1, len(titles), (4.2 * len(titles) + 2.6, 4.6))
    for title, label, runs in lines:
        axes, curves = panels[titles.index(title)], [row["valid"] for row in runs]
        style = "-" if runs[0].get("rule") in (None, "", "reference") else "--"
        look: dict[str, Any] = {"color": ALWAYS[runs[0]["scheme"]], "linestyle": style}
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
    every = [bits for _, _, runs in lines for row in runs for bits in row["valid"].values()]
    loss_axes(panels, [bits for bits in every if bits < math.inf], entropy)
    for axes, title in zip(panels, titles):
        axes.set(title=title, xlabel="updates")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False, fontsize="small")
    panels[0].set_ylabel(BITS)
    return figure


def draw_panels(panels: Panels, colours: dict[str, str], against: str, measure: Measure) -> tuple[Figure, list[Axes]]:
    """Draw lines through the means over the seeds. Each run is a dot, or a cross if it diverged.

    Args:
        colours: the colour of each label; a line without a colour is black and thick.
        against: the axis of the grid that the horizontal axis shows.
    """
    columns = min(4 if len(panels) > 6 else 3, len(panels))
    height = -(-len(panels) // columns)
    figure, grid = subplots(height, columns, (max(7.5, 2.3 * columns), max(4.2, 1.8 * height + 1.2)))
    for panel, (title, lines) in zip(grid.flat, panels.items()):
        places = values([row for runs in lines.values() for row in runs], against, float)
        for label, runs in lines.items():
            colour, width = (colours[label], 1.5) if label in colours else ("black", 2.0)
            groups = grouped(runs, against).items()
            means = {places.index(place): fmean(map(measure, same)) for (place,), same in groups}
            panel.plot(*zip(*sorted(means.items())), label=label, zorder=3, color=colour, linewidth=width)
            for row in runs:
                mark = "x" if row.get("diverged") or row.get("verdict") == "diverged" else "o"
                place = places.index(row[against])
                panel.plot(place, measure(row), mark, markersize=4, clip_on=False, zorder=3, color=colour)
        panel.set_xticks(range(len(places)), places)
        panel.set_title(title)
    for panel in grid.flat[len(panels) :]:
        panel.set_visible(False)
    return figure, list(grid.flat[: len(panels)])


def legend(figure: Figure, panel: Axes, title: str) -> None:
    shown = [(handle, text) for handle, text in zip(*panel.get_legend_handles_labels()) if text != panel.get_title()]
    figure.legend(
        *zip(*shown), loc="outside upper center", ncols=min(5, len(shown)), frameon=False, fontsize="small", title=title
    )


def by_scheme(rows: Sequence[Row]) -> Panels:
    """The panels of make compare: one for each scheme at the largest depth, each with Admin, Post-LN and Pre-LN."""
    layers = depths_of(rows)[-1]
    schemes = grouped((row for row in rows if row["layers"] == layers), "scheme")
    known = {TITLES[key]: runs for (key,), runs in schemes.items() if key in ALWAYS}
    others = {TITLES[key]: runs for (key,), runs in schemes.items() if key not in ALWAYS}
    return {title: known | {title: runs} for title, runs in others.items()} or {sizes(layers): known}


def draw_rates(rows: Sequence[Row]) -> Figure:
    """The loss by learning rate: in make compare the mean of the last validations, otherwise the last validation."""
    if "layers" in rows[0]:
        panels, measure, colours = by_scheme(rows), loss, {TITLES[key]: colour for key, colour in ALWAYS.items()}
    else:
        panels, measure = by_level(rows), last
        colours = dict(zip(dict.fromkeys(label for lines in panels.values() for label in lines), COLOURS))
    figure, drawn = draw_panels(panels, colours, "lr", measure)
    loss_axes(drawn, map(measure, rows), rows[0]["entropy"])
    figure.supxlabel("learning rate", fontsize="medium")
    figure.supylabel(BITS, fontsize="medium")
    legend(
        figure, drawn[0], f"lines: means of the seeds, which are dots; crosses: diverged, at {EXPLODED} of the entropy"
    )
    return figure


def draw_accuracies(rows: Sequence[Row]) -> Figure:
    """The accuracies of make deeper by the number of new layers, each scheme at its best rate."""
    lines: dict[str, list[Row]] = {}
    for ranking in rankings(rows):
        lines.setdefault(TITLES[ranking.scheme], []).extend(ranking.at_best.values())
    others = [title for name, title in TITLES.items() if title in lines and name not in ALWAYS]
    colours = dict(zip(others, itertools.cycle(COLOURS))) | {TITLES[name]: colour for name, colour in ALWAYS.items()}
    figure, (axes,) = draw_panels({"": lines}, colours, "layers", accuracy)
    axes.axhline(0.5, color="grey", linewidth=0.8, linestyle=":", label="chance")
    axes.set(xlabel="new layers (0: the head alone)", ylabel="accuracy, test")
    legend(figure, axes, "lines: means of the seeds (dots) at the best rate")
    return figure


def notes(rows: Sequence[Row]) -> Iterator[str]:
    """The notes below a table."""
    yield f"Columns: recipes/research/ranking.py. Brackets: Student's t over the seeds, {LEVEL:.0%}."
    if "entropy" in rows[0]:
        entropy = ", ".join(sorted({f"{row['entropy']:.3f}" for row in rows}))
        yield (
            f"Bits: the mean of a run's last {LAST} validations. A token has an entropy of {entropy} bits; a run "
            f"learned if its last validation is below {PLATEAU} of that (recipes/research/outcome.py)."
        )
        yield from (f"BLEU: {text}" for text in values((row for row in rows if row["signature"]), "signature"))
    code, machines = (", ".join(values(rows, name)) for name in ("commit", "hardware"))
    hours = sum(row["seconds"] for row in rows) / 3600
    yield f"Commit {code}; {machines}; {hours:.2f} hours of updates in {len(rows)} runs."


def write(folder: Path, rows: Sequence[Row]) -> None:
    """Write all tables and figures."""
    write_runs(folder / "runs.csv", rows)
    compared = table(rows) if "layers" in rows[0] else learning(rows)
    write_table(folder / "table", titled(compared), notes(rows))
    if "diverged" in rows[0]:
        save(draw_accuracies(rows), folder / "accuracy.png")
    else:
        save(draw_rates(rows), folder / "rates.png")
