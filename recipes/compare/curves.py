"""Draw the validation losses of a comparison, each scheme at the learning rate chosen for it: a panel per depth, a
colour per scheme; thin lines are seeds, thick their mean. The loss's axis begins below the lowest and is logarithmic,
which shows how far apart low losses are.

python -m recipes.compare.curves RUN/curves.png RUN/*/result.json
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from recipes.compare import drawing
from recipes.compare.grid_table import read_results
from recipes.compare.rates import BOUND, ENTROPY
from recipes.compare.standing import standings
from recipes.compare.verdict import PLATEAU
from recipes.steps.common import run
from recipes.steps.plugin import SCHEMES

if TYPE_CHECKING:
    from fairseq_admin.analysis.figure import ALWAYS, COLOURS
else:
    from recipes.plugin.analysis.figure import ALWAYS, COLOURS

STYLES = ("-", "--", ":", "-.")


def mean_curve(curves: list[dict[int, float]]) -> dict[int, float]:
    """The mean where every curve still has a finite value."""
    shared = set.intersection(*(set(curve) for curve in curves)) if curves else set()
    means = {updates: sum(curve[updates] for curve in curves) / len(curves) for updates in sorted(shared)}
    return {updates: bits for updates, bits in means.items() if math.isfinite(bits)}


def looks(schemes: list[str]) -> dict[str, dict[str, str]]:
    """Colour and dashes of every scheme: its own colour, or the next of the others."""
    others = [name for name in schemes if name not in ALWAYS]
    found = {name: {"color": ALWAYS[name], "linestyle": "-"} for name in schemes if name in ALWAYS}
    for number, name in enumerate(others):
        dashes = STYLES[number // len(COLOURS) % len(STYLES)]
        found[name] = {"color": COLOURS[number % len(COLOURS)], "linestyle": dashes}
    return found


def limits(curves: list[dict[int, float]], entropy: float) -> tuple[float, float]:
    """From a little below the lowest loss to a little above the highest or the plateau's bound, or to 1.3 entropies."""
    losses = [bits for curve in curves for bits in curve.values() if 0 < bits < math.inf]
    low, high = min([PLATEAU * entropy, *losses]), max([PLATEAU * entropy, *losses])
    return 0.95 * low, 1.05 * min(high, 1.25 * entropy)


def draw(results: list[dict]) -> Figure:
    schemes = [name for name in SCHEMES if name in {result["scheme"] for result in results}]
    look = looks(schemes)
    them = {(standing.layers, standing.scheme): standing for standing in standings(results)}
    depths = sorted({layers for layers, _ in them}, key=int)
    figure, panels = pyplot.subplots(
        1, len(depths), figsize=(4.2 * len(depths) + 2.4, 4.6), sharey=True, squeeze=False, layout="constrained"
    )
    entropy = results[0]["entropy"]
    shown = [result for standing in them.values() for result in standing.at_best.values()]
    low, top = limits([result["valid"] for result in shown], entropy)
    for axes, depth in zip(panels[0], depths):
        crosses = 0
        for scheme in schemes:
            standing = them.get((depth, scheme))
            found = list(standing.at_best.values()) if standing else []
            for result in found:
                axes.plot(*zip(*result["valid"].items()), linewidth=0.6, alpha=0.5, **look[scheme])
                if result["verdict"] == "diverged":  # one below the other, where several are at one update
                    place = 0.98 - 0.04 * crosses
                    colour = look[scheme]["color"]
                    axes.plot(result["update"], place, "x", color=colour, transform=axes.get_xaxis_transform())
                    crosses += 1
            means = mean_curve([result["valid"] for result in found])
            axes.plot(list(means), list(means.values()), linewidth=1.6, label=SCHEMES[scheme].title, **look[scheme])
        if entropy < top:
            axes.axhline(entropy, color="grey", linewidth=0.8, linestyle=":", label=ENTROPY)
        axes.axhline(PLATEAU * entropy, color="grey", linewidth=0.8, linestyle="--", label=BOUND)
        axes.set(title=f"{depth}L-{depth}L, each at its chosen rate", xlabel="updates", yscale="log", ylim=(low, top))
        axes.yaxis.set_major_locator(LogLocator(subs=range(1, 10) if top < 10 * low else (1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
    notes = {
        "thin: seeds": any(len(standing.at_best) > 1 for standing in them.values()),
        "cross: diverged": any(result["verdict"] == "diverged" for result in shown),
    }
    said = ", ".join(note for note, there in notes.items() if there)
    panels[0][0].set_ylabel(f"bits per token, validation{said and f' ({said})'}")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


def main() -> None:
    args = drawing.arguments(__doc__).parse_args()
    drawing.draw(args, lambda: draw(read_results(args.results)))


if __name__ == "__main__":
    run(main)
