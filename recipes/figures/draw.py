"""Draw the first figure of README.md again: `make figures`.

    python -m recipes.figures.draw --runs runs -o docs/images

writes demo-loss.png from the runs of `make demo` with METHOD=admin, post-ln and pre-ln.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from recipes.steps.common import replacing, run
from recipes.steps.plugin import SCHEMES
from recipes.steps.summary import Run, finished_runs

if TYPE_CHECKING:
    from fairseq_admin.analysis.figure import ALWAYS
else:
    from recipes.plugin.analysis.figure import ALWAYS

COLOURS = {SCHEMES[scheme].title: colour for scheme, colour in ALWAYS.items()}
METHODS = tuple(COLOURS)
MARKERS = dict(zip(METHODS, "osD"))


def demo_runs(runs: Path) -> list[Run]:
    """The demo's three runs, in the order of METHODS.

    Raises:
        ValueError: one has not been run to its score.
    """
    found = {it.name: it for it in finished_runs(runs / "demo" / "admin-cpu-s1")}
    missing = [name for name in METHODS if name not in found]
    if missing:
        commands = "; ".join(f"make demo METHOD={name.lower()}" for name in missing)
        raise ValueError(f"{runs}/demo: found no score of {' and '.join(missing)}; run {commands} first.")
    return [found[name] for name in METHODS]


def label_places(values: list[float], least: float) -> list[float]:
    """Where to write the labels of these values: at the values, or moved up until they are `least` apart."""
    places: dict[int, float] = {}
    free = float("-inf")
    for number in sorted(range(len(values)), key=values.__getitem__):
        places[number] = max(values[number], free)
        free = places[number] + least
    return [places[number] for number in range(len(values))]


def draw_loss(runs: list[Run], path: Path) -> None:
    """Loss against updates, each curve labelled at its end."""
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    ends = [list(it.log.valid.values())[-1] for it in runs]
    for it, end, place in zip(runs, ends, label_places(ends, 1.4)):
        colour = COLOURS[it.name]
        axes.plot(*zip(*it.log.train.items()), color=colour, alpha=0.35, linewidth=1)
        axes.plot(*zip(*it.log.valid.items()), MARKERS[it.name], markersize=4, color=colour, clip_on=False)
        text = f"{it.name}\n{end:.2f} bits, BLEU {float(it.score['score']):.1f}"
        axes.text(1.02, place, text, transform=axes.get_yaxis_transform(), color=colour, va="center", fontweight="bold")
    axes.set(
        xlabel="updates", ylabel="loss, bits per token", xlim=(0, max(it.log.updates for it in runs)), ylim=(0, None)
    )
    axes.set_title("lines: training, dots: validation", loc="left", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def save(figure, path: Path) -> None:
    """As a PNG about twice as wide as a page shows it."""
    with replacing(path) as part:
        figure.savefig(part, format="png", dpi=180, metadata={"Software": None}, pil_kwargs={"optimize": True})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=Path, required=True, help="the folder with demo/ in it")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write to")
    args = parser.parse_args()
    runs = demo_runs(args.runs)
    draw_loss(runs, args.output / "demo-loss.png")


if __name__ == "__main__":
    run(main)
