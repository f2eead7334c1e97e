"""Draw the loss of every scheme against the learning rate: where it learns is its window.

python -m recipes.compare.rates RUN/rates.png RUN/*/result.json
python -m recipes.compare.rates rates.png runs.csv
"""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipes.compare import drawing
from recipes.compare.grid_table import read_results
from recipes.compare.standing import Standing, loss, standings
from recipes.compare.verdict import PLATEAU
from recipes.steps.common import run
from recipes.steps.plugin import SCHEMES

# Okabe and Ito's blue, vermilion and bluish green, which the colour-blind can tell apart; in every panel.
ALWAYS = {"admin": "#0072B2", "post-ln": "#D55E00", "pre-ln": "#009E73"}
COLUMNS = 4


def line(axes: Axes, standing: Standing, colour: str, width: float) -> None:
    """The mean over the seeds, and the range as a bar; a cross where a seed diverged."""
    rates = [float(rate) for rate in standing.runs]
    losses = [[loss(result) for result in runs] for runs in standing.runs.values()]
    means = [sum(them) / len(them) for them in losses]
    bars = [[mean - min(them) for mean, them in zip(means, losses)], [max(t) - m for m, t in zip(means, losses)]]
    axes.errorbar(
        rates, means, bars, color=colour, linewidth=width, marker="o", markersize=2 + width, capsize=2,
        elinewidth=0.8, label=SCHEMES[standing.scheme].title,
    )  # fmt: skip
    bad = [(rate, mean) for (rate, mean, runs) in zip(rates, means, standing.runs.values())
           if any(result["verdict"] == "diverged" for result in runs)]  # fmt: skip
    if bad:  # with no cross at all, the layout would leave room for one at a rate of 0
        axes.plot([rate for rate, _ in bad], [mean for _, mean in bad], "x", color=colour, markersize=8, clip_on=False)


def draw(results: list[dict], layers: str) -> Figure:
    """A panel a scheme, with Admin, Post-LN and Pre-LN in each to compare with."""
    them = standings([result for result in results if result["layers"] == layers])
    known = [it for it in them if it.scheme in ALWAYS]
    others = [it for it in them if it.scheme not in ALWAYS] or known[:1]
    columns = min(COLUMNS, len(others))
    height = -(-len(others) // columns)
    size = max(7.5, 2.6 * columns + 0.8), max(4.2, 2.3 * height + 0.9)
    figure, panels = pyplot.subplots(
        height, columns, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    entropy = results[0]["entropy"]
    rates = sorted({rate for it in them for rate in it.runs}, key=float)
    for axes, standing in zip(panels.flat, others):
        for it in known:
            line(axes, it, ALWAYS[it.scheme], 1.0)
        if standing not in known:
            line(axes, standing, "black", 2.0)
        axes.axhline(PLATEAU * entropy, color="grey", linewidth=0.8, linestyle="--", label="plateau above")
        axes.axhline(entropy, color="grey", linewidth=0.8, linestyle=":", label="entropy of a token")
        axes.set(
            title=SCHEMES[standing.scheme].title if standing not in known else f"{layers}L-{layers}L", xscale="log"
        )
        axes.set_xticks([float(rate) for rate in rates], rates, fontsize="x-small")
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
    shown, hidden = list(panels.flat)[: len(others)], list(panels.flat)[len(others) :]
    for axes in hidden:
        axes.set_visible(False)
    for axes in shown[-columns:]:  # the last in every column
        axes.set_xlabel("learning rate")
        axes.tick_params(labelbottom=True)
    for axes in panels[:, 0]:
        axes.set_ylabel("bits per token, validation")
    handles = {text: handle for axes in panels.flat for handle, text in zip(*axes.get_legend_handles_labels())}
    shared = [SCHEMES[it.scheme].title for it in known] + ["plateau above", "entropy of a token"]
    figure.legend(
        [handles[text] for text in shared],
        shared,
        loc="outside upper center",
        ncols=len(shared),
        frameon=False,
        title=("" if others[0] in known else "black: the panel's own scheme; ")
        + "bar: range of the seeds; cross: one diverged",
        title_fontsize="small",
    )
    return figure


def main() -> None:
    args = drawing.arguments(__doc__).parse_args()
    results = read_results(args.results)
    deepest = max({result["layers"] for result in results}, key=int)
    drawing.draw(args, lambda: draw(results, deepest))


if __name__ == "__main__":
    run(main)
