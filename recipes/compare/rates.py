"""Draw the loss of every scheme against the learning rate: where it learns is its window.

python -m recipes.compare.rates RUN/rates.png RUN/*/result.json
python -m recipes.compare.rates rates.png runs.csv
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipes.compare import drawing
from recipes.compare.grid_table import read_results
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
ONE_SEED, DIVERGED = "one seed", f"a seed diverged (drawn at {EXPLODED} of the entropy at most)"


def line(axes: Axes, standing: Standing, width: float) -> None:
    """The mean over the seeds, and the range as a bar; hollow where there is one seed, a cross where one diverged."""
    points = []
    for rate, runs in standing.runs.items():
        losses = list(map(loss, runs))
        mean = sum(losses) / len(losses)
        diverged = any(result["verdict"] == "diverged" for result in runs)
        points.append((float(rate), mean, mean - min(losses), max(losses) - mean, len(losses) == 1, diverged))
    look: dict[str, Any] = {"color": colour(standing.scheme), "markersize": 3 + width}
    rates, means, below, above, alone, bad = zip(*points)
    axes.errorbar(
        rates, means, [below, above], marker="o", linewidth=width, capsize=2, elinewidth=0.8,
        label=SCHEMES[standing.scheme].title, zorder=3, **look,
    )  # fmt: skip
    for mark, face, chosen, label in (("o", "white", alone, ONE_SEED), ("x", None, bad, DIVERGED)):
        there = [(rate, mean) for rate, mean, is_so in zip(rates, means, chosen) if is_so]
        if there:
            axes.plot(
                *zip(*there), mark, linestyle="none", markerfacecolor=face, label=label, zorder=4, clip_on=False, **look
            )


def draw(results: list[dict], layers: str) -> Figure:
    """A panel a scheme, with Admin, Post-LN and Pre-LN in each to compare with."""
    rows = standings([result for result in results if result["layers"] == layers])
    known = [standing for standing in rows if standing.scheme in ALWAYS]
    others = [standing for standing in rows if standing.scheme not in ALWAYS] or known[:1]
    columns = min(COLUMNS, len(others))
    height = -(-len(others) // columns)
    size = max(7.5, 2.3 * columns + 0.8), max(4.2, 2.0 * height + 1.2)
    figure, panels = pyplot.subplots(
        height, columns, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    entropy = results[0]["entropy"]
    rates = sorted({rate for standing in rows for rate in standing.runs}, key=float)
    for axes, standing in zip(panels.flat, others):
        for drawn in known if standing in known else [*known, standing]:
            line(axes, drawn, 1.0 if drawn in known else 2.0)
        axes.axhline(entropy, color="grey", linewidth=0.8, linestyle=":", label=ENTROPY)
        axes.axhline(PLATEAU * entropy, color="grey", linewidth=0.8, linestyle="--", label=BOUND)
        title = SCHEMES[standing.scheme].title if standing not in known else f"{layers}L-{layers}L"
        axes.set(title=title, xscale="log")
        axes.set_xticks([float(rate) for rate in rates], rates)
        axes.minorticks_off()
        axes.margins(x=0.08)
    drawing.loss_axis(panels.flat, [loss(it) for it in results if it["layers"] == layers], entropy, EXPLODED)
    for axes in panels.flat[len(others) :]:
        axes.set_visible(False)
    for axes in panels.flat[: len(others)][-columns:]:  # the last in every column
        axes.set_xlabel("learning rate")
        axes.tick_params(labelbottom=True)
    for axes in panels[:, 0]:
        axes.set_ylabel("bits per token, validation")
    wanted = [*(SCHEMES[standing.scheme].title for standing in known), ENTROPY, BOUND, ONE_SEED, DIVERGED]
    handles = {text: handle for axes in panels.flat for handle, text in zip(*axes.get_legend_handles_labels())}
    texts = [text for text in wanted if text in handles]
    figure.legend(
        [handles[text] for text in texts], texts, loc="outside upper center", ncols=4 if columns > 2 else 3,
        frameon=False, fontsize="small",
    )  # fmt: skip
    return figure


def main() -> None:
    args = drawing.arguments(__doc__).parse_args()
    results = read_results(args.results)
    deepest = max({result["layers"] for result in results}, key=int)
    drawing.draw(args, lambda: draw(results, deepest))


if __name__ == "__main__":
    run(main)
