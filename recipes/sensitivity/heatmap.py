"""Draw a sensitivity grid: a panel per scheme, learning rate against beta2, the colour the last validation loss.

    python -m recipes.sensitivity.heatmap RUN/heatmap.png RUN/*/result.json

With several seeds it is their mean. A cross marks a cell in which any run diverged, a bar one on the plateau.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.figure import Figure

from recipes.compare.grid_table import places, read_results
from recipes.compare.verdict import EXPLODED
from recipes.steps.common import replacing, run
from recipes.steps.plugin import SCHEMES


def cell(results: list[dict]) -> tuple[float, str]:
    """The value that colours a cell, in bits, and its mark.

    A run without a finite loss counts with the loss beyond which a run has diverged.
    """
    bound = EXPLODED * results[0]["entropy"]
    values = [result["bits"] for result in results]
    bits = sum(bound if v is None or not math.isfinite(v) else min(v, bound) for v in values) / len(values)
    kinds = {result["verdict"] for result in results}
    return bits, "x" if "diverged" in kinds else "-" if "plateau" in kinds else ""


def draw(results: list[dict]) -> Figure:
    schemes = [name for name in SCHEMES if name in {result["scheme"] for result in results}]
    rates, betas = (sorted({result[axis] for result in results}, key=float) for axis in ("lr", "beta2"))
    found = {place: cell(them) for place, them in places(results, ["scheme", "beta2", "lr"]).items()}
    low, high = min(bits for bits, _ in found.values()), max(bits for bits, _ in found.values())
    figure, panels = pyplot.subplots(
        1, len(schemes), figsize=(1 + 0.75 * len(rates) * len(schemes), 1.6 + 0.6 * len(betas)), squeeze=False,
        sharey=True, layout="constrained",
    )  # fmt: skip
    for axes, scheme in zip(panels[0], schemes):
        table = [[found.get((scheme, beta, rate), (math.nan, ""))[0] for rate in rates] for beta in betas]
        image = axes.imshow(table, vmin=low, vmax=high, cmap="viridis_r", aspect="auto")
        for y, beta in enumerate(betas):
            for x, rate in enumerate(rates):
                bits, mark = found.get((scheme, beta, rate), (math.nan, ""))
                colour = "white" if bits > (low + high) / 2 else "black"
                label = {"x": "×", "-": f"{bits:.2f}\n—", "": f"{bits:.2f}"}[mark]
                axes.text(x, y, label, ha="center", va="center", color=colour, fontsize=8)
        axes.set_xticks(range(len(rates)), rates)
        axes.set_yticks(range(len(betas)), betas)
        axes.set(title=SCHEMES[scheme].title, xlabel="learning rate")
    panels[0][0].set_ylabel("beta2")
    figure.colorbar(image, ax=panels[0].tolist(), label="bits a token, valid\n(×: diverged, —: plateau)")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("figure", type=Path)
    parser.add_argument("results", type=Path, nargs="+")
    args = parser.parse_args()
    figure = draw(read_results(args.results))
    with replacing(args.figure) as part:
        figure.savefig(part, format="png", dpi=150)


if __name__ == "__main__":
    run(main)
