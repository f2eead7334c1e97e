"""Draw the accuracy of every scheme, a panel for each number of new layers, each at its best rate.

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
from recipes.compare.grid_table import ALONE
from recipes.compare.outcomes import LEVEL, interval
from recipes.compare.rates import ALWAYS
from recipes.compare.standing import Standing
from recipes.deeper.standing import accuracy, at_best_rates, read_results
from recipes.deeper.summary import title
from recipes.steps.common import run

# Of Okabe and Ito's colours, after those that a scheme always has.
COLOURS = {**ALWAYS, ALONE: "grey", "dt-fixup": "black", "deepnorm": "#E69F00", "rezero": "#CC79A7"}
LIMITS = 0.4, 1.0
"""Of the accuracies that are shown; what is beyond is cut off."""
GUESS = 0.5


def panel(axes: Axes, standings: list[Standing]) -> None:
    """The schemes at one depth, next to each other: mean, interval and seeds."""
    for place, it in enumerate(standings):
        seeds, colour = list(map(accuracy, it.at_best.values())), COLOURS.get(it.scheme)
        found = interval(seeds)
        if found.count > 1:
            axes.vlines(place, found.low, found.high, color=colour, linewidth=1)
        axes.plot([place], [found.mean], "o", color=colour, markersize=7, label=title(it.scheme))
        axes.plot([place + 0.25] * len(seeds), seeds, ".", color=colour, markersize=4, alpha=0.6, clip_on=False)
    axes.axhline(GUESS, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(standings)), [title(it.scheme) for it in standings], rotation=90)
    axes.set(xlim=(-0.6, len(standings) - 0.4), ylim=LIMITS)
    axes.spines[["top", "right"]].set_visible(False)


def draw(results: list[dict]) -> Figure:
    """A panel for every depth, and one for the head alone."""
    them = at_best_rates(results)
    depths = {depth: [it for it in them if it.layers == depth] for depth in sorted({it.layers for it in them}, key=int)}
    figure, panels = pyplot.subplots(
        1, len(depths), figsize=(7.5, 4), sharey=True, squeeze=False, layout="constrained",
        width_ratios=[len(standings) for standings in depths.values()],
    )  # fmt: skip
    for axes, (depth, standings) in zip(panels[0], depths.items()):
        panel(axes, standings)
        axes.set_title("" if int(depth) == 0 else f"{depth} new layers", fontsize="medium")
    last = panels[0][-1]
    last.text(1, GUESS, " chance", transform=last.get_yaxis_transform(), color="grey", va="center", fontsize="small")
    panels[0][0].set_ylabel("accuracy, test")
    figure.suptitle(
        f"large: mean of the seeds (small) at the best rate; bars: {LEVEL:.0%} interval, cut at the axes",
        fontsize="medium", x=0.01, ha="left",
    )  # fmt: skip
    return figure


def main() -> None:
    args = drawing.arguments(__doc__).parse_args()
    drawing.draw(args, lambda: draw(read_results(args.results)))


if __name__ == "__main__":
    run(main)
