"""Draw a grid of learning rates: a panel per scheme, the rate against another axis, the colour the last loss.

    python -m recipes.sensitivity.heatmap RUN/heatmap.png RUN/*/result.json --against beta2

Where the grid has optimizers, each has a row of panels. With several seeds a cell is their mean of the last validation
loss. A cross marks a cell in which any run diverged, a bar one on the plateau.
"""

from __future__ import annotations

import math

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from recipes.compare import drawing
from recipes.compare.grid_table import places, read_results
from recipes.compare.verdict import EXPLODED
from recipes.steps.common import run
from recipes.steps.plugin import SCHEMES

NAMES = {"adam": "Adam", "sgd": "SGD", "warmup": "updates of warm-up"}


def cell(results: list[dict]) -> tuple[float, str]:
    """The value that colours a cell, in bits, and its mark.

    A run without a finite loss counts with the loss beyond which a run has diverged.
    """
    bound = EXPLODED * results[0]["entropy"]
    values = [result["bits"] for result in results]
    bits = sum(bound if v is None or not math.isfinite(v) else min(v, bound) for v in values) / len(values)
    kinds = {result["verdict"] for result in results}
    return bits, "x" if "diverged" in kinds else "-" if "plateau" in kinds else ""


Found = dict[tuple[str, ...], tuple[float, str]]


def ticks(results: list[dict], axis: str) -> list[str]:
    """An axis' values in the grid."""
    return sorted({result[axis] for result in results}, key=float)


def panel(axes: Axes, found: Found, values: list[str], rates: list[str], low: float, high: float) -> AxesImage:
    """One scheme, and one optimizer: from the other axis' value and the learning rate to a cell."""
    for y, value in enumerate(values):
        for x, rate in enumerate(rates):
            bits, mark = found.get((value, rate), (math.nan, ""))
            colour = "white" if bits > (low + high) / 2 else "black"
            label = {"x": "×", "-": f"{bits:.2f}\n—", "": f"{bits:.2f}"}[mark]
            axes.text(x, y, label, ha="center", va="center", color=colour, fontsize=8)
    axes.set_xticks(range(len(rates)), rates)
    axes.set_yticks(range(len(values)), values)
    axes.set_xlabel("learning rate")
    table = [[found.get((value, rate), (math.nan, ""))[0] for rate in rates] for value in values]
    return axes.imshow(table, vmin=low, vmax=high, cmap="viridis_r", aspect="auto")


def draw(results: list[dict], against: str = "beta2") -> Figure:
    schemes = [name for name in SCHEMES if name in {result["scheme"] for result in results}]
    results = [{"optimizer": "", **result} for result in results]
    optimizers = list(dict.fromkeys(result["optimizer"] for result in results))
    values = ticks(results, against)
    found = {place: cell(them) for place, them in places(results, ["scheme", "optimizer", against, "lr"]).items()}
    bits = [value for value, _ in found.values()]
    width = max(len(ticks([it for it in results if it["optimizer"] == name], "lr")) for name in optimizers)
    figure, panels = pyplot.subplots(
        len(optimizers), len(schemes),
        figsize=(1 + max(0.75 * width, 1.8) * len(schemes), (1.6 + 0.6 * len(values)) * len(optimizers)),
        squeeze=False, sharey=True, layout="constrained",
    )  # fmt: skip
    for row, optimizer in zip(panels, optimizers):
        rates = ticks([it for it in results if it["optimizer"] == optimizer], "lr")
        for axes, scheme in zip(row, schemes):
            own = {place[2:]: it for place, it in found.items() if place[:2] == (scheme, optimizer)}
            image = panel(axes, own, values, rates, min(bits), max(bits))
            axes.set_title(SCHEMES[scheme].title + (f", {NAMES[optimizer]}" if optimizer else ""))
        row[0].set_ylabel(NAMES.get(against, against))
    figure.colorbar(image, ax=panels.ravel().tolist(), label="bits per token, valid\n(×: diverged, —: plateau)")
    return figure


def main() -> None:
    parser = drawing.arguments(__doc__)
    parser.add_argument("--against", default="beta2", help="the axis of the grid that is not the learning rate")
    args = parser.parse_args()
    axes = ("scheme", "lr", args.against, "seed")
    drawing.draw(args, lambda: draw(read_results(args.results, axes), args.against))


if __name__ == "__main__":
    run(main)
