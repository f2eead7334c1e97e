"""Draw the validation losses of a comparison, each scheme at its best learning rate: a panel per depth, a colour per
scheme; thin lines are seeds, thick their mean.

python -m recipes.compare.curves RUN/curves.png RUN/*/result.json
"""

from __future__ import annotations

import math

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.figure import Figure

from recipes.compare import drawing
from recipes.compare.grid_table import read_results
from recipes.compare.rates import ALWAYS, BOUND, ENTROPY
from recipes.compare.standing import standings
from recipes.compare.verdict import PLATEAU
from recipes.steps.common import run
from recipes.steps.plugin import SCHEMES

STYLES = ("-", "--")


def mean_curve(curves: list[dict[int, float]]) -> dict[int, float]:
    """The mean where every curve still has a finite value."""
    shared = set.intersection(*(set(curve) for curve in curves)) if curves else set()
    means = {updates: sum(curve[updates] for curve in curves) / len(curves) for updates in sorted(shared)}
    return {updates: bits for updates, bits in means.items() if math.isfinite(bits)}


def draw(results: list[dict]) -> Figure:
    schemes = [name for name in SCHEMES if name in {result["scheme"] for result in results}]
    them = {(standing.layers, standing.scheme): standing for standing in standings(results)}
    depths = sorted({layers for layers, _ in them}, key=int)
    figure, panels = pyplot.subplots(
        1, len(depths), figsize=(4.2 * len(depths) + 2.4, 4.6), sharey=True, squeeze=False, layout="constrained"
    )
    entropy = results[0]["entropy"]
    top = 1.25 * entropy
    for axes, depth in zip(panels[0], depths):
        for number, scheme in enumerate(schemes):
            standing = them.get((depth, scheme))
            look = {"color": ALWAYS.get(scheme, f"C{number % 10}"), "linestyle": STYLES[number // 10 % 2]}
            found = list(standing.at_best.values()) if standing else []
            for result in found:
                axes.plot(*zip(*result["valid"].items()), linewidth=0.5, alpha=0.35, **look)
                if result["verdict"] == "diverged":
                    axes.plot(result["update"], 0.98 * top, "x", color=look["color"], clip_on=False)
            means = mean_curve([result["valid"] for result in found])
            axes.plot(list(means), list(means.values()), linewidth=1.6, label=SCHEMES[scheme].title, **look)
        axes.axhline(entropy, color="grey", linewidth=0.8, linestyle=":", label=ENTROPY)
        axes.axhline(PLATEAU * entropy, color="grey", linewidth=0.8, linestyle="--", label=BOUND)
        axes.set(title=f"{depth}L-{depth}L, each at its best rate", xlabel="updates", ylim=(0, top))
    panels[0][0].set_ylabel("bits per token, validation (cross: diverged)")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


def main() -> None:
    args = drawing.arguments(__doc__).parse_args()
    drawing.draw(args, lambda: draw(read_results(args.results)))


if __name__ == "__main__":
    run(main)
