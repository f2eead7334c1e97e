"""The figures of README.md and docs/, except report.png: `make figures`.

    python -m recipes.figures.docs runs -o docs/images

draws the rows and numbers that docs/ keeps; fresh models, on the demo's sentences where it has been run, else on random
words, as the figure then says; and the demo's model where there is one.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from fairseq_admin import cli
from fairseq_admin.analysis import figure
from recipes.compare.rows import TITLES, read_results
from recipes.figures import accuracy, analysis, curves, rates
from recipes.figures.drawing import ALWAYS, BITS, MARKERS, save, subplots
from recipes.steps import results
from recipes.steps.common import replacing, run
from recipes.steps.logs import from_cell

DOCS = Path(__file__).resolve().parents[2] / "docs"
GRIDS = {
    "compare": (rates.draw, "compare.csv"),
    "sensitivity": (rates.draw, "sensitivity.csv"),
    "multi30k-curves": (curves.draw, "multi30k.csv"),
    "deeper": (accuracy.draw, "deeper.csv"),
}
"""How rows are drawn, and which."""
APART = 1.4
"""Bits from one label to the next, at least."""


def draw_demo(rows: Sequence[dict[str, str]]) -> Figure:
    """The loss on validation in `make demo`, of a row of results.csv a method.

    A curve is labelled at its end, or above that, where labels would overlap.
    """
    figure, ((axes,),) = subplots(1, 1, (8, 4))
    curves = {row["method"]: from_cell(row["valid"]) for row in rows}
    bleu = {row["method"]: float(row["score"]) for row in rows}
    place = -APART
    for method, curve in sorted(curves.items(), key=lambda item: item[1][max(item[1])]):
        end, colour = curve[max(curve)], ALWAYS[method]
        axes.plot(*zip(*curve.items()), marker=MARKERS[method], markersize=4, color=colour, clip_on=False)
        text, place = f"{TITLES[method]}\n{end:.2f} bits, BLEU {bleu[method]:.1f}", max(end, place + APART)
        axes.text(1.02, place, text, transform=axes.get_yaxis_transform(), color=colour, va="center", fontweight="bold")
    axes.set(xlabel="updates", ylabel=BITS, xlim=(0, max(map(max, curves.values()))), ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_analysis(runs: Path, folder: Path) -> None:
    """The figures of docs/analysis.md."""
    data = runs / "demo/data/bin"
    sentences = ["--data", str(data)] if (data / "dict.de.txt").exists() else ["--random-tokens"]
    numbers = {path.stem: path for path in DOCS.glob("output-change-*.json")}
    for name, arguments in analysis.measurements(runs / "demo").items():
        if status := cli.main(["analyze", *arguments, *sentences, "-o", str(folder / name)]):
            raise SystemExit(status)  # it has said what is wrong
        numbers[name] = folder / f"{name}.json"
    for name, draw in {"output-change": analysis.output_changes, "gradients": analysis.all_gradients}.items():
        schemes = [f"{name}-{scheme}" for scheme in ("post-ln", "pre-ln", "admin")]
        measured = [json.loads(numbers[it].read_text(encoding="utf-8")) for it in schemes if it in numbers]
        figure.save(draw, measured, folder / f"{name}.png", folder / f"{name}.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path, help="the folder with demo/ in it")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write to")
    args = parser.parse_args()
    for library in ("matplotlib", "PIL"):  # fairseq lets every library tell all
        logging.getLogger(library).setLevel(logging.WARNING)
    for name, (draw, rows) in GRIDS.items():
        save(draw(read_results([DOCS / rows])), args.output / f"{name}.png")
    runs = [row for row in results.read(DOCS / "results.csv") if (row["recipe"], row["seed"]) == ("demo", "1")]
    save(draw_demo(runs), args.output / "demo-loss.png", dpi=180)
    with tempfile.TemporaryDirectory() as folder:
        draw_analysis(args.runs, Path(folder))
        for path in Path(folder).glob("*.png"):
            with replacing(args.output / f"analysis-{path.name}") as part:
                shutil.copyfile(path, part)


if __name__ == "__main__":
    run(main)
