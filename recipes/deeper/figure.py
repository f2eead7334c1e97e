"""Draw the accuracy of every scheme against the number of new layers, each at its best rate.

python -m recipes.deeper.figure OUT/accuracy.png OUT/*/result.json
python -m recipes.deeper.figure accuracy.png runs.csv
"""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipes.compare import drawing
from recipes.compare.rates import ALWAYS
from recipes.compare.standing import LEVEL, Interval, Standing, interval
from recipes.deeper.standing import ALONE, accuracy, at_best_rates, read_results
from recipes.deeper.summary import title
from recipes.steps.common import run

# Of Okabe and Ito's colours, after those that a scheme always has.
COLOURS = {**ALWAYS, "dt-fixup": "black", "deepnorm": "#E69F00", "rezero": "#CC79A7"}
# How far apart the schemes' bars at one depth are, in depths.
APART = 0.07


def measured(standing: Standing) -> Interval:
    return interval(list(map(accuracy, standing.at_best.values())))


def alone(axes: Axes, standing: Standing) -> None:
    """The head alone, which has no depth: its mean, and its seeds at the left edge."""
    axes.axhline(measured(standing).mean, color="grey", linewidth=1, linestyle="--", label=title(ALONE))
    seeds = list(map(accuracy, standing.at_best.values()))
    axes.plot([-0.5 + APART / 3] * len(seeds), seeds, ".", color="grey", markersize=4)


def draw(results: list[dict]) -> Figure:
    """A line a scheme: means, their intervals as bars, and the seeds as dots, side by side at a depth."""
    them = at_best_rates(results)
    depths = sorted({int(it.layers) for it in them if it.scheme != ALONE})
    schemes = list(dict.fromkeys(it.scheme for it in them if it.scheme != ALONE))
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for number, (scheme, marker) in enumerate(zip(schemes, "osD^v<>pPX*hH8d")):
        points = {int(it.layers): measured(it) for it in them if it.scheme == scheme}
        means = [points[depth].mean for depth in sorted(points)]
        places = [depths.index(depth) + APART * (number - (len(schemes) - 1) / 2) for depth in sorted(points)]
        bars = [mean - points[depth].low for mean, depth in zip(means, sorted(points))]
        axes.errorbar(
            places, means, bars, color=COLOURS.get(scheme), marker=marker, markersize=5, linewidth=1.2, elinewidth=0.8,
            capsize=2, label=title(scheme),
        )  # fmt: skip
        for it in (it for it in them if it.scheme == scheme):
            seeds = list(map(accuracy, it.at_best.values()))
            place = places[sorted(points).index(int(it.layers))]
            axes.plot([place + APART / 3] * len(seeds), seeds, ".", color=COLOURS.get(scheme), alpha=0.5, markersize=4)
    for it in them:
        if it.scheme == ALONE:
            alone(axes, it)
    axes.axhline(0.5, color="grey", linewidth=0.8, linestyle=":", label="a guess")
    axes.set(xlabel="new layers", ylabel="accuracy, test", xlim=(-0.5, len(depths) - 0.5), ylim=(0.4, 1.0))
    axes.set_xticks(range(len(depths)), map(str, depths))
    axes.set_title(
        f"mean of the seeds (dots), each at its best rate; bars: {LEVEL:.0%} interval", loc="left", fontsize="medium"
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False)
    return figure


def main() -> None:
    args = drawing.arguments(__doc__).parse_args()
    drawing.draw(args, lambda: draw(read_results(args.results)))


if __name__ == "__main__":
    run(main)
