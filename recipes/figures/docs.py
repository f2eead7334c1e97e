"""Tables and figures of README.md and docs/, from the rows and numbers in docs/rows.

    python -m recipes.figures.docs -o docs/images     # make figures
    python -m recipes.figures.docs docs/results.md    # make tables

A table is between `<!-- table NAME -->` and `<!-- end -->`. `fairseq-admin analyze` draws the other figures;
docs/analysis.md has the commands.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Container, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fairseq_admin.analysis import figure
from recipes.compare import ranking
from recipes.compare.rows import TITLES, Row, read_results, titled
from recipes.figures import drawing
from recipes.figures.drawing import ALWAYS, BITS, save, subplots
from recipes.steps import results
from recipes.steps.common import replacing, run, write_lines
from recipes.steps.results import from_cell
from recipes.steps.summary import titled as rule_title

MARKERS = dict(zip(ALWAYS, "osD"))
ROWS = Path(__file__).resolve().parents[2] / "docs/rows"
GRIDS = {
    "compare": (drawing.draw_rates, "compare.csv"),
    "sensitivity-18l": (drawing.draw_rates, "sensitivity-18l.csv"),
    "warmup": (drawing.draw_rates, "warmup.csv"),
    "deeper": (drawing.draw_accuracies, "deeper.csv"),
}
"""Figures of grids by name: the function that draws a figure, and its rows."""
RECIPES = {"demo": "demo-loss", "multi30k/de-en": "multi30k-60l"}
"""The recipes in results.csv whose losses are drawn (seed 1), each with the name of its figure."""
LAWS = {"linear": "a + b N", "logarithmic": "a + b ln N"}
"""The laws of the output change. A figure names the law that fits better."""


def standing(rows: list[Row], without: Container[str]) -> list[Row]:
    """The table of make compare without some columns."""
    return [{key: row[key] for key in row if key not in without} for row in titled(ranking.table(rows))]


TABLES: dict[str, tuple[Callable[[list[Row]], list[Row]], str]] = {
    "every-scheme": (partial(standing, without={"layers", "learned"}), "compare.csv"),
    "sensitivity-18l": (ranking.learning, "sensitivity-18l.csv"),
}
"""Tables of the pages by name: the function that makes a table, and its rows."""


def table(name: str) -> str:
    tabulated, file = TABLES[name]
    rows = tabulated(read_results([ROWS / file]))
    lines = [rows[0], ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def write_tables(page: str) -> str:
    """The text of a page with its tables made again from the rows.

    Raises:
        ValueError: the page names a table that is not in TABLES.
    """

    def written(place: re.Match[str]) -> str:
        if place[1] not in TABLES:
            raise ValueError(f"found a place for the table {place[1]}; expected one of {', '.join(TABLES)}.")
        return f"<!-- table {place[1]} -->\n{table(place[1])}<!-- end -->"

    return re.sub(r"<!-- table (\S+) -->\n.*?<!-- end -->", written, page, flags=re.S)


def draw_losses(rows: Sequence[dict[str, str]]) -> Figure:
    """The validation losses of a recipe, a curve for each row. Curves with a rule other than `reference` are dashed."""
    drawn, ((axes,),) = subplots(1, 1, (8, 4))
    curves = [from_cell(row["valid"]) for row in rows]
    for curve, row in sorted(zip(curves, rows), key=lambda pair: -pair[0][max(pair[0])]):
        look = {"color": ALWAYS[row["method"]], "marker": MARKERS[row["method"]]}
        look["linestyle"] = "-" if row["rule"] in ("", "reference") else "--"
        name, end = rule_title(TITLES[row["method"]], row["rule"]), curve[max(curve)]
        label = f"{name}: {end:.2f} bits, BLEU {float(row['score']):.1f}"
        axes.plot(*zip(*curve.items()), markersize=4, clip_on=False, label=label, **look)
    axes.set(xlabel="updates", ylabel=BITS, xlim=(0, max(map(max, curves))), ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="at the end:", frameon=False)
    return drawn


def draw_output_changes(results: Sequence[dict[str, Any]]) -> Figure:
    """Draw how much noise and one update change each scheme's output. Hollow markers are estimates by theorem 2."""
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


def write_figures(folder: Path) -> None:
    for name, (draw, rows) in GRIDS.items():
        save(draw(read_results([ROWS / rows])), folder / f"{name}.png", dpi=120)
    for recipe, name in RECIPES.items():
        runs = [row for row in results.read(ROWS / "results.csv") if (row["recipe"], row["seed"]) == (recipe, "1")]
        save(draw_losses(runs), folder / f"{name}.png", dpi=180)
    numbers = [ROWS / f"output-change-{scheme}.json" for scheme in ("post-ln", "pre-ln", "admin")]
    changes = [json.loads(path.read_text(encoding="utf-8")) for path in numbers]
    with replacing(folder / "analysis-output-change.png") as part:
        figure.save(draw_output_changes, changes, part, Path(os.devnull))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", type=Path, nargs="*", help="pages whose tables are written again")
    parser.add_argument("-o", "--output", type=Path, help="folder for the figures")
    args = parser.parse_args()
    for path in args.pages:
        write_lines(path, write_tables(path.read_text(encoding="utf-8")).splitlines())
    if args.output:
        write_figures(args.output)


if __name__ == "__main__":
    run(main)
