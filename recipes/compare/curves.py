"""Draw the validation losses of a comparison, each scheme at the learning rate chosen for it and at those that are as
good: a panel per depth, a colour per scheme; thin lines are seeds, thick ones their mean, or the seeds if they are few.

python -m recipes.compare.curves RUN/curves.png RUN/*/result.json
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.figure import Figure

from recipes.compare import drawing
from recipes.compare.grid_table import read_results
from recipes.compare.outcomes import FEWEST
from recipes.compare.rates import BOUND, ENTROPY
from recipes.compare.standing import Standing, standings
from recipes.compare.verdict import PLATEAU
from recipes.steps.common import run
from recipes.steps.plugin import SCHEMES

if TYPE_CHECKING:
    from fairseq_admin.analysis.figure import ALWAYS, COLOURS
else:
    from recipes.plugin.analysis.figure import ALWAYS, COLOURS

STYLES = ("-", "--", ":", "-.")
AS_GOOD = (0, (1, 1))
"""The dashes of a rate that is as good as the best."""
MOST = 1.25
"""Where the axis ends at the latest, in entropies: a loss that has exploded says no more."""


def mean_curve(curves: list[dict[int, float]]) -> dict[int, float]:
    """The mean where every curve still has a finite value."""
    shared = set.intersection(*(set(curve) for curve in curves)) if curves else set()
    means = {updates: sum(curve[updates] for curve in curves) / len(curves) for updates in sorted(shared)}
    return {updates: bits for updates, bits in means.items() if math.isfinite(bits)}


def looks(schemes: list[str]) -> dict[str, dict[str, Any]]:
    """Colour and dashes of every scheme: its own colour, or the next of the others."""
    others = [name for name in schemes if name not in ALWAYS]
    found = {name: {"color": ALWAYS[name], "linestyle": "-"} for name in schemes if name in ALWAYS}
    for number, name in enumerate(others):
        dashes = STYLES[number // len(COLOURS) % len(STYLES)]
        found[name] = {"color": COLOURS[number % len(COLOURS)], "linestyle": dashes}
    return found


def rates_of(standing: Standing) -> list[str]:
    """The best one, and those that are as good."""
    return [standing.best, *standing.as_good]


def told(scheme: str, number: int, them: dict[str, Standing], several: bool) -> str:
    """A line's name: the scheme and its best rate, or the next one that is as good, of each depth that has one.

    Args:
        them: the scheme's standings by depth.
        several: whether there are several seeds anywhere, so that one is worth a word.
    """
    rates = {}
    for depth, standing in them.items():
        for rate in rates_of(standing)[number : number + 1]:
            rates[depth] = rate + " (one seed)" * (several and len(standing.runs[rate]) == 1)
    alike = len(set(rates.values())) == 1
    each = [*rates.values()][:1] if alike else [f"{depth}L {rate}" for depth, rate in rates.items()]
    return f"{SCHEMES[scheme].title}, {', '.join(each)}"


def draw(results: list[dict]) -> Figure:
    schemes = [name for name in SCHEMES if name in {result["scheme"] for result in results}]
    look = looks(schemes)
    found = sorted(standings(results), key=lambda it: int(it.layers))
    them = {name: {it.layers: it for it in found if it.scheme == name} for name in schemes}
    depths = list(dict.fromkeys(it.layers for it in found))
    figure, panels = pyplot.subplots(
        1, len(depths), figsize=(4.2 * len(depths) + 2.6, 4.6), sharey=True, squeeze=False, layout="constrained"
    )
    entropy = results[0]["entropy"]
    shown = [result for it in found for rate in rates_of(it) for result in it.runs[rate]]
    several = any(len(it.runs[rate]) > 1 for it in found for rate in rates_of(it))
    losses = [bits for result in shown for bits in result["valid"].values() if 0 < bits < math.inf]
    top = drawing.loss_axis(panels[0], losses, entropy, MOST)
    lines = [(scheme, n) for scheme in schemes for n in range(max(len(rates_of(it)) for it in them[scheme].values()))]
    for axes, depth in zip(panels[0], depths):
        crosses = 0
        for scheme, number in lines:
            style = {**look[scheme], **({"linestyle": AS_GOOD} if number else {})}
            rates = rates_of(them[scheme][depth])[number : number + 1] if depth in them[scheme] else []
            runs = [result for rate in rates for result in them[scheme][depth].runs[rate]]
            for result in runs:
                axes.plot(*zip(*result["valid"].items()), linewidth=0.6, alpha=0.5, **style)
                if result["verdict"] == "diverged":  # one below the other, where several are at one update
                    place = 0.98 - 0.04 * crosses
                    axes.plot(result["update"], place, "x", color=style["color"], transform=axes.get_xaxis_transform())
                    crosses += 1
            curves = [result["valid"] for result in runs]
            label = told(scheme, number, them[scheme], several)
            for thick in curves if 0 < len(curves) < FEWEST else [mean_curve(curves)]:
                axes.plot(list(thick), list(thick.values()), linewidth=1.6, label=label, **style)
                label = ""
        if entropy < top:
            axes.axhline(entropy, color="grey", linewidth=0.8, linestyle=":", label=ENTROPY)
        axes.axhline(PLATEAU * entropy, color="grey", linewidth=0.8, linestyle="--", label=BOUND)
        axes.set(title=f"{depth}L-{depth}L", xlabel="updates")
    notes = {
        "thin: seeds, thick: mean": several,
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
