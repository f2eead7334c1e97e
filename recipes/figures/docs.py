"""The figures of README.md and docs/ that show what docs/ keeps, rows and numbers: `make figures`.

    python -m recipes.figures.docs -o docs/images

The others are by `fairseq-admin analyze`; docs/analysis.md has the commands.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fairseq_admin.analysis import figure
from recipes.compare.rows import TITLES, read_results
from recipes.figures import drawing
from recipes.figures.drawing import ALWAYS, BITS, MARKERS, save, subplots
from recipes.steps import results
from recipes.steps.common import replacing, run
from recipes.steps.results import from_cell
from recipes.steps.summary import titled

DOCS = Path(__file__).resolve().parents[2] / "docs"
GRIDS = {
    "compare": (drawing.draw_rates, "compare.csv"),
    "sensitivity": (drawing.draw_rates, "sensitivity.csv"),
    "sensitivity-18l": (drawing.draw_rates, "sensitivity-18l.csv"),
    "warmup": (drawing.draw_rates, "warmup.csv"),
    "multi30k-curves": (drawing.draw_curves, "multi30k.csv"),
    "deeper": (drawing.draw_accuracies, "deeper.csv"),
}
"""How rows are drawn, and which."""
RECIPES = {"demo": "demo-loss", "multi30k/de-en": "multi30k-60l"}
"""Of results.csv: whose losses are drawn, of seed 1, and into which figure."""
APART = 1.4
"""Bits from one label to the next, at least."""
LAWS = {"linear": "a + b N", "logarithmic": "a + b ln N"}
"""Of the change of the output, of which the better one is named."""


def draw_losses(rows: Sequence[dict[str, str]]) -> Figure:
    """The validation losses of a recipe: a curve for each row of results.csv, dashed unless omega is by `reference`.

    A curve is labelled at its end, or above that, where labels would overlap.
    """
    drawn, ((axes,),) = subplots(1, 1, (8, 4))
    place, updates = -APART, 0
    curves = [from_cell(row["valid"]) for row in rows]
    for curve, row in sorted(zip(curves, rows), key=lambda pair: pair[0][max(pair[0])]):
        end, updates, colour = curve[max(curve)], max(updates, *curve), ALWAYS[row["method"]]
        look = {"marker": MARKERS[row["method"]], "linestyle": "-" if row["rule"] in ("", "reference") else "--"}
        axes.plot(*zip(*curve.items()), markersize=4, color=colour, clip_on=False, **look)
        label = titled(TITLES[row["method"]], row["rule"])
        text, place = f"{label}\n{end:.2f} bits, BLEU {float(row['score']):.1f}", max(end, place + APART)
        axes.text(1.02, place, text, transform=axes.get_yaxis_transform(), color=colour, va="center", fontweight="bold")
    axes.set(xlabel="updates", ylabel=BITS, xlim=(0, updates), ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    return drawn


def draw_output_changes(results: Sequence[dict[str, Any]]) -> Figure:
    """The output's change by noise and by an update, a series a scheme; theorem 2's estimates hollow."""
    drawn, panels = figure.panels(2, height=3.6)
    for result in results:
        scheme = result["model"]["scheme"]
        look: dict[str, Any] = {"color": ALWAYS[scheme], "marker": MARKERS[scheme]}
        for axes, series in zip(panels, result["series"].values()):
            law, fit = max(series["fits"].items(), key=lambda item: item[1]["r2"])
            label = f"{result['model']['title']}: {LAWS[law]}, R² {fit['r2']:.3f}"
            axes.plot(series["depths"], series["change"], label=label, **look)
            estimates = series.get("theorem 2", {"predicted": []})["predicted"]
            axes.plot(series["depths"][: len(estimates)], estimates, linestyle="none", markerfacecolor="none", **look)
    noise, update = results[0]["series"].values()
    panels[0].set(title=f"{100 * noise['relative noise']:g} % of noise (hollow: theorem 2)")
    panels[0].set(ylabel="|F(x, W) − F(x, W*)|², mean a channel")
    panels[1].set(title=f"one update by Adam at {update['lr']:g}")
    for axes in panels:
        axes.set(xlabel=f"layers N of the {results[0]['stack']}", ylim=(0, None))
        axes.set_xticks(noise["depths"])
        axes.legend()
    width, tokens = results[0]["model"]["width"], results[0]["tokens"]
    figure.set_title(drawn, f"Change of the output: width {width}, at initialisation ({tokens} tokens)")
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write to")
    folder = parser.parse_args().output
    for name, (draw, rows) in GRIDS.items():
        save(draw(read_results([DOCS / rows])), folder / f"{name}.png", dpi=120)
    for recipe, name in RECIPES.items():
        runs = [row for row in results.read(DOCS / "results.csv") if (row["recipe"], row["seed"]) == (recipe, "1")]
        save(draw_losses(runs), folder / f"{name}.png", dpi=180)
    numbers = [DOCS / f"output-change-{scheme}.json" for scheme in ("post-ln", "pre-ln", "admin")]
    changes = [json.loads(path.read_text(encoding="utf-8")) for path in numbers]
    with replacing(folder / "analysis-output-change.png") as part:
        figure.save(draw_output_changes, changes, part, Path(os.devnull))


if __name__ == "__main__":
    run(main)
