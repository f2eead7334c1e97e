"""Several schemes in one figure, on the same axes, where one figure each would hide how far apart they are."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fairseq_admin.analysis import figure, gradients
from recipes.figures.draw import COLOURS, MARKERS

LAWS = {"linear": "a + b N", "logarithmic": "a + b ln N"}
LEAST = 0.9
"""The R² from which a fit is drawn."""


def _fitted(axes: Axes, found: dict[str, Any], colour: str) -> str:
    """Draw the better of the two fits, if it is one; what to say of it."""
    law, line = max(found["fits"].items(), key=lambda item: item[1]["r2"])
    if line["r2"] < LEAST:
        return f"neither law, R² at most {line['r2']:.2f}"
    first, last = found["depths"][0], found["depths"][-1]
    fine = [first + (last - first) * step / 200 for step in range(201)]
    values = [line["intercept"] + line["slope"] * (n if law == "linear" else math.log(n)) for n in fine]
    axes.plot(fine, values, color=colour)
    return f"{LAWS[law]}, R² {line['r2']:.3f}"


def output_changes(results: list[dict[str, Any]]) -> Figure:
    """A panel for noise and one for an update, each with a series a scheme; theorem 2's estimates hollow."""
    drawn, panels = figure.panels(2, height=3.6)
    for result in results:
        name = result["model"]["title"]
        look: dict[str, Any] = {"linestyle": "none", "color": COLOURS[name], "marker": MARKERS[name]}
        for axes, found in zip(panels, result["series"].values()):
            text = f"{name}: {_fitted(axes, found, look['color'])}"
            axes.plot(found["depths"], found["change"], label=text, **look)
            if "theorem 2" in found:
                hollow = {**look, "markersize": 7, "markerfacecolor": "none", "markeredgewidth": 0.8}
                axes.plot(found["depths"], found["theorem 2"]["predicted"], **hollow)
    noise, update = results[0]["series"].values()
    rate = f"{update['lr']:.0e}".replace("e-0", "e-")
    titles = f"{100 * noise['relative noise']:g} % of noise (hollow: theorem 2)", f"one update by Adam at {rate}"
    for axes, title in zip(panels, titles):
        axes.set(title=title, xlabel=f"layers N of the {results[0]['stack']}", ylim=(0, None))
        axes.set_xticks(noise["depths"])
        axes.legend()
    panels[0].set_ylabel("|F(x, W) − F(x, W*)|², mean a channel")
    model = results[0]["model"]
    tokens = results[0]["tokens"]
    figure.set_title(drawn, f"Change of the output: width {model['width']}, at initialisation ({tokens} tokens)")
    return drawn


def all_gradients(results: list[dict[str, Any]]) -> Figure:
    """A row of panels a scheme; those of a column have one scale."""
    drawn = Figure(figsize=(figure.WIDTH, 2.7 * len(results)), layout="constrained")
    drawn.subfigures(len(results), 1)
    for result, part in zip(results, drawn.subfigs):
        gradients.fill(part.subplots(1, 3), result)
        figure.headline(part, "Gradients", result)
    for column in zip(*(part.axes for part in drawn.subfigs)):
        low, high = zip(*(axes.get_ylim() for axes in column))
        for axes in column:
            axes.set_ylim(min(low), max(high))
    return drawn
