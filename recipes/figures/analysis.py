"""The figures of docs/analysis.md: what is measured for each, and the two in which several schemes are compared.

The output changes are drawn from the numbers in docs/output-change-*.json, which take an hour at width 512. All other
fresh models have the sizes of the demo's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fairseq_admin.analysis import figure, gradients
from recipes.figures.drawing import ALWAYS, MARKERS

FRESH = [
    *("--arch", "transformer_admin_18l", "--encoder-embed-dim", "64", "--encoder-ffn-embed-dim", "128"),
    *("--encoder-attention-heads", "4", "--decoder-attention-heads", "4", "--dropout", "0", "--share-all-embeddings"),
    *("--admin-ffn-init", "xavier"),
]
RUN = "admin-cpu-s1"
LAWS = {"linear": "a + b N", "logarithmic": "a + b ln N"}
"""Of the change of the output, of which the better one is named."""


def fresh(what: str, scheme: str, *options: str) -> list[str]:
    return [what, *FRESH, "--admin-scheme", scheme, *options]


def measurements(demo: Path) -> dict[str, list[str]]:
    """The arguments of fairseq-admin analyze, by the figure's name; of a trained model where its run is at hand."""
    named = {f"dependency-{scheme}": fresh("dependency", scheme) for scheme in ALWAYS}
    for scheme in ("post-ln", "pre-ln"):
        named[f"gradients-{scheme}"] = fresh("gradients", scheme, "--tokens", "512", "--repeats", "8", "--json")
    average = demo / RUN / "average.pt"
    if average.exists():
        named |= {"dependency-trained": ["dependency", str(average)], "omega": ["omega", str(average)]}
        checkpoints = (demo / RUN / "checkpoints").glob("checkpoint_*_*.pt")
        first, *_, last = sorted(checkpoints, key=lambda path: int(path.stem.split("_")[2]))
        named["updates"] = ["updates", str(first), str(last)]
    return named


def output_changes(results: Sequence[dict[str, Any]]) -> Figure:
    """A panel for noise and one for an update, each with a series a scheme; theorem 2's estimates hollow."""
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


def all_gradients(results: Sequence[dict[str, Any]]) -> Figure:
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
