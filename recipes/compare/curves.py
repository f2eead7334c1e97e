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
from matplotlib.axes import Axes
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


def draw(results: list[dict]) -> Figure:
    schemes = [name for name in SCHEMES if name in {result["scheme"] for result in results}]
    look = looks(schemes)
    rows = sorted(standings(results), key=lambda row: (int(row.layers), schemes.index(row.scheme)))
    depths = list(dict.fromkeys(row.layers for row in rows))
    figure, panels = pyplot.subplots(
        1, len(depths), figsize=(4.2 * len(depths) + 2.6, 4.6), sharey=True, squeeze=False, layout="constrained"
    )
    entropy = results[0]["entropy"]
    drawn = [(row, rate) for row in rows for rate in (row.best, *row.as_good)]
    losses = [bits for row, rate in drawn for run in row.runs[rate] for bits in run["valid"].values()]
    top = drawing.loss_axis(panels[0], [bits for bits in losses if 0 < bits < math.inf], entropy, MOST)
    for axes, depth in zip(panels[0], depths):
        for row, rate in drawn:
            if row.layers == depth:
                curves_of(axes, row, rate, look[row.scheme])
        if entropy < top:
            axes.axhline(entropy, color="grey", linewidth=0.8, linestyle=":", label=ENTROPY)
        axes.axhline(PLATEAU * entropy, color="grey", linewidth=0.8, linestyle="--", label=BOUND)
        axes.set(title=f"{depth}L-{depth}L (thin: seeds, thick: mean of three or more)", xlabel="updates")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False, fontsize="small")
    panels[0][0].set_ylabel("bits per token, validation")
    return figure


def curves_of(axes: Axes, row: Standing, rate: str, style: dict[str, Any]) -> None:
    """The runs of a scheme at its best rate, or, dotted, at one that is as good."""
    runs, style = row.runs[rate], {**style, **({} if rate == row.best else {"linestyle": AS_GOOD})}
    for result in runs:
        axes.plot(*zip(*result["valid"].items()), linewidth=0.6, alpha=0.5, **style)
        if result["verdict"] == "diverged":
            axes.plot(result["update"], 0.98, "x", color=style["color"], transform=axes.get_xaxis_transform())
    curves = [result["valid"] for result in runs]
    label = f"{SCHEMES[row.scheme].title}, {rate}{' (one seed)' if len(runs) == 1 else ''}"
    for thick in curves if len(curves) < FEWEST else [mean_curve(curves)]:
        axes.plot(list(thick), list(thick.values()), linewidth=1.6, label=label, **style)
        label = ""


def main() -> None:
    args = drawing.arguments(__doc__).parse_args()
    drawing.draw(args, lambda: draw(read_results(args.results)))


if __name__ == "__main__":
    run(main)
