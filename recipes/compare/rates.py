"""Draw the loss of every scheme against the learning rate: where it learns is its window.

python -m recipes.compare.rates RUN/rates.png RUN/*/result.json
python -m recipes.compare.rates rates.png runs.csv
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import ScaledTranslation

from recipes.compare import drawing
from recipes.compare.grid_table import read_results
from recipes.compare.outcomes import interval
from recipes.compare.standing import Standing, loss, standings
from recipes.compare.verdict import EXPLODED, PLATEAU
from recipes.steps.common import run
from recipes.steps.plugin import SCHEMES

if TYPE_CHECKING:
    from fairseq_admin.analysis.figure import ALWAYS, colour
else:
    from recipes.plugin.analysis.figure import ALWAYS, colour

COLUMNS = 4
ENTROPY, BOUND = "entropy of a token", f"plateau ({PLATEAU} of the entropy)"
CROSS, APART = 6, 10
"""The size of a cross, and how far those at one rate are from each other, in points."""


def diverged(standing: Standing) -> list[str]:
    """The rates at which a seed did."""
    return [rate for rate, them in standing.runs.items() if any(result["verdict"] == "diverged" for result in them)]


def line(axes: Axes, standing: Standing, width: float) -> None:
    """The mean over the seeds, and the range as a bar; hollow where there is one seed."""
    own = colour(standing.scheme)
    rates = [float(rate) for rate in standing.runs]
    losses = [[loss(result) for result in runs] for runs in standing.runs.values()]
    means = [sum(them) / len(them) for them in losses]
    bars = [[mean - min(them) for mean, them in zip(means, losses)], [max(t) - m for m, t in zip(means, losses)]]
    axes.errorbar(
        rates, means, bars, color=own, linewidth=width, capsize=2, elinewidth=0.8,
        label=SCHEMES[standing.scheme].title,
    )  # fmt: skip
    for face, several in ((own, True), ("white", False)):
        there = [point for *point, them in zip(rates, means, losses) if (len(them) > 1) == several]
        if there:
            look: dict[str, Any] = {"color": own, "markerfacecolor": face, "markersize": 3 + width, "zorder": 3}
            axes.plot(*zip(*there), "o", linestyle="none", **look)


def crosses(axes: Axes, them: list[Standing]) -> None:
    """A cross, in the line's colour, where a seed diverged; those of several lines at one rate next to each other."""
    count = Counter(rate for standing in them for rate in diverged(standing))
    drawn: Counter[str] = Counter()
    for standing in them:
        for rate in diverged(standing):
            mean = interval([loss(result) for result in standing.runs[rate]]).mean
            points = APART * (drawn[rate] - (count[rate] - 1) / 2)
            aside = ScaledTranslation(points / 72, 0, axes.figure.dpi_scale_trans)
            drawn[rate] += 1
            # Not axes.plot, which would count the points aside as data, and scale the axes to them.
            cross = Line2D(
                [float(rate)], [mean], marker="x", color=colour(standing.scheme), markersize=CROSS, markeredgewidth=2,
                zorder=4, transform=axes.transData + aside,
            )  # fmt: skip
            axes.add_artist(cross).set_clip_on(False)


def explained(handles: dict[str, Any], them: list[Standing], own: bool) -> dict[str, Any]:
    """What the legend says of lines and markers, with what is drawn; only of what is there."""
    runs = [results for it in them for results in it.runs.values()]
    found = {SCHEMES[it.scheme].title: Line2D([], [], color=ALWAYS[it.scheme]) for it in them if it.scheme in ALWAYS}
    if own:
        found["the panel's own scheme"] = Line2D([], [], color="black", linewidth=2)
    found.update((text, handles[text]) for text in (ENTROPY, BOUND))
    for text, face, there in (
        ("several seeds: mean and range", "grey", any(len(them) > 1 for them in runs)),
        ("one seed", "white", any(len(them) == 1 for them in runs)),
    ):
        if there:
            found[text] = Line2D([], [], color="grey", marker="o", markerfacecolor=face, linestyle="none")
    if any(result["verdict"] == "diverged" for them in runs for result in them):
        text = f"a seed diverged (drawn at {EXPLODED} of the entropy at most)"
        found[text] = Line2D([], [], color="grey", marker="x", markersize=CROSS, markeredgewidth=2, linestyle="none")
    return found


def draw(results: list[dict], layers: str) -> Figure:
    """A panel a scheme, with Admin, Post-LN and Pre-LN in each to compare with."""
    them = standings([result for result in results if result["layers"] == layers])
    known = [it for it in them if it.scheme in ALWAYS]
    others = [it for it in them if it.scheme not in ALWAYS] or known[:1]
    columns = min(COLUMNS, len(others))
    height = -(-len(others) // columns)
    size = max(7.5, 2.3 * columns + 0.8), max(4.2, 2.0 * height + 1.2)
    figure, panels = pyplot.subplots(
        height, columns, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    entropy = results[0]["entropy"]
    rates = sorted({rate for it in them for rate in it.runs}, key=float)
    for axes, standing in zip(panels.flat, others):
        lines = known if standing in known else [*known, standing]
        for it in lines:
            line(axes, it, 1.0 if it in known else 2.0)
        crosses(axes, lines)
        axes.axhline(entropy, color="grey", linewidth=0.8, linestyle=":", label=ENTROPY)
        axes.axhline(PLATEAU * entropy, color="grey", linewidth=0.8, linestyle="--", label=BOUND)
        axes.set(
            title=SCHEMES[standing.scheme].title if standing not in known else f"{layers}L-{layers}L", xscale="log"
        )
        axes.set_xticks([float(rate) for rate in rates], rates)
        axes.minorticks_off()
        axes.margins(x=0.08)
    drawing.loss_axis(panels.flat, [loss(it) for it in results if it["layers"] == layers], entropy, EXPLODED)
    shown, hidden = list(panels.flat)[: len(others)], list(panels.flat)[len(others) :]
    for axes in hidden:
        axes.set_visible(False)
    for axes in shown[-columns:]:  # the last in every column
        axes.set_xlabel("learning rate")
        axes.tick_params(labelbottom=True)
    for axes in panels[:, 0]:
        axes.set_ylabel("bits per token, validation")
    handles = {text: handle for axes in panels.flat for handle, text in zip(*axes.get_legend_handles_labels())}
    found = explained(handles, them, own=others[0] not in known)
    figure.legend(
        [*found.values()], [*found], loc="outside upper center", ncols=4 if columns > 2 else 3, frameon=False,
        fontsize="small",
    )  # fmt: skip
    return figure


def main() -> None:
    args = drawing.arguments(__doc__).parse_args()
    results = read_results(args.results)
    deepest = max({result["layers"] for result in results}, key=int)
    drawing.draw(args, lambda: draw(results, deepest))


if __name__ == "__main__":
    run(main)
