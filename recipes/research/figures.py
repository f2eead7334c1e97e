"""Figures of README.md and docs/, and the tables of docs/results.md, from the rows in docs/rows.

`make figures` writes them. A table is between `<!-- table NAME -->` and `<!-- end -->`. `fairseq-admin analyze` draws
the other figures; docs/analysis.md has the commands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean, stdev

import matplotlib
from matplotlib.figure import Figure

from fairseq_admin.analysis.figure import LOOK
from recipes.research import omega_screen, ranking
from recipes.research.drawing import Line, draw_accuracies, draw_losses, draw_rates, save
from recipes.research.intervals import contrast
from recipes.research.omega_screen import DOCS
from recipes.research.outcome import loss
from recipes.research.rows import TITLES, Row, read_results, sizes, titled
from recipes.steps import results
from recipes.steps.common import run, write_lines
from recipes.steps.results import from_cell, grouped
from recipes.steps.summary import rule_title

ROWS = DOCS / "rows"
GRIDS = {**dict.fromkeys(("compare", "sensitivity-18l", "warmup"), draw_rates), "deeper": draw_accuracies}
"""The functions that draw the figures of grids, by the name of the figure and of its rows."""
SCREEN = {"omega-variances": (omega_screen.draw, 130), "24-layers": (omega_screen.draw_curves, 180)}
"""The figures of the screen, likewise, each with its resolution."""
PROTOCOLS = {
    "protocol": (["protocol"], ("6", "18")),
    "protocol-omega": (["protocol-omega", "protocol"], ("18", "60-12")),
}
"""The figures of the protocols: their rows, and a panel for each depth."""
PILOT = "1"
"""The seed of the protocols' pilots, which do not count."""
DEMO_ENTROPY = 6.62
"""The entropy of a token of the demo's text, in bits."""


def groups_of(files: Sequence[str], *depths: str) -> list[Line]:
    """The groups of a protocol at some depths: depth, method, and runs. If two files have one, the last counts.

    The protocol on omega ran two seeds of `reference` again, to show that the first protocol's runs may count.
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    for file in files:
        rows = [row for row in read_results([ROWS / f"{file}.csv"]) if row["seed"] != PILOT]
        for row in rows:
            row["rule"] = row.get("rule") or ("reference" if row["scheme"] == "admin" else "")
        groups |= grouped(rows, "layers", "scheme", "rule")
    return [
        (sizes(depth), rule_title(TITLES[scheme], rule), runs)
        for depth in depths
        for (layers, scheme, rule), runs in groups.items()
        if layers == depth
    ]


def seeds_compared(files: Sequence[str], depth: str) -> list[Row]:
    """The outcome of each group at a depth, and Welch's interval of its difference to the first one."""
    table, first = [], list[float]()
    for size, method, runs in groups_of(files, depth):
        bits, bleu = list(map(loss, runs)), fmean(row["bleu"] for row in runs)
        spread = f"{fmean(bits):.3f} ({stdev(bits):.3f})"
        row = {"model": f"{size}, {method}", "bits: mean (standard deviation)": spread, "sacreBLEU": f"{bleu:.1f}"}
        row["bits minus the first row's"] = f"{contrast([(1, bits), (-1, first)]):+.3f}" if first else ""
        table.append(row)
        first = first or bits
    return table


def at_one_depth() -> list[Row]:
    """The table of make compare, without the depth and the number of runs that learned."""
    table = titled(ranking.table(read_results([ROWS / "compare.csv"])))
    return [{title: row[title] for title in row if title not in ("layers", "learned")} for row in table]


TABLES: dict[str, Callable[[], list[Row]]] = {
    "every-scheme": at_one_depth,
    "sensitivity-18l": lambda: ranking.learning(read_results([ROWS / "sensitivity-18l.csv"])),
    "screen": lambda: omega_screen.limits(omega_screen.load(ROWS / "omega-screen.csv")),
    "six-seeds": partial(seeds_compared, ["protocol"], "18"),
    "six-layers": partial(seeds_compared, ["protocol"], "6"),
    "rules": partial(seeds_compared, ["protocol-omega", "protocol"], "18"),
    "sixty-layers": partial(seeds_compared, ["protocol-omega"], "60-12"),
}
"""The functions that make the tables of the pages, by name."""


def table(name: str) -> str:
    rows = TABLES[name]()
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


def draw_results(rows: Sequence[dict[str, str]], entropy: float) -> Figure:
    """The validation losses of a recipe, a curve for each row of results.csv."""
    lines = []
    for row in sorted(rows, key=lambda row: -float(row["valid"].rpartition(":")[2])):
        one: Row = {"scheme": row["method"], "rule": row["rule"], "verdict": "", "valid": from_cell(row["valid"])}
        name, end = rule_title(TITLES[row["method"]], row["rule"]), row["valid"].rpartition(":")[2]
        lines.append(("", f"{name}: {float(end):.2f} bits, BLEU {float(row['score']):.1f}", [one]))
    return draw_losses(lines, entropy)


def draw_groups(files: Sequence[str], depths: Sequence[str]) -> Figure:
    """The validation losses of a protocol's runs, in a panel for each depth."""
    groups = groups_of(files, *depths)
    lines = [(f"{size} (thin: seeds, thick: mean)", method, runs) for size, method, runs in groups]
    return draw_losses(lines, groups[0][2][0]["entropy"])


def main() -> None:
    page, images = DOCS / "results.md", DOCS / "images"
    write_lines(page, write_tables(page.read_text(encoding="utf-8")).splitlines())
    for name, draw in GRIDS.items():
        save(draw(read_results([ROWS / f"{name}.csv"])), images / f"{name}.png", dpi=120)
    for name, (files, depths) in PROTOCOLS.items():
        save(draw_groups(files, depths), images / f"{name}.png")
    with matplotlib.rc_context(LOOK):
        for name, (draw_screen, dpi) in SCREEN.items():
            save(draw_screen(omega_screen.load(ROWS / f"{name}.csv")), images / f"{name}.png", dpi=dpi)
    demos = [row for row in results.read(ROWS / "results.csv") if (row["recipe"], row["seed"]) == ("demo", "1")]
    save(draw_results(demos, DEMO_ENTROPY), images / "demo-loss.png")


if __name__ == "__main__":
    run(main)
