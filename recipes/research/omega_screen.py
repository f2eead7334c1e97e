"""Which rules for omega leave the plateau? The table and the figures of the screen of docs/protocol-omega.md.

`make figures` writes them from the rows (docs/images/omega-variances.png and 24-layers.png). Every run of the protocol
is there. Commit 83c3ee4a has the program that made the rows, docs/examples/omega_screen.py, with its sixteen methods; a
row names the commit at which it was made.
"""

from __future__ import annotations

import csv
import math
from itertools import takewhile
from pathlib import Path
from typing import Any

from fairseq_admin.analysis import figure
from recipes.steps.results import grouped

DOCS = Path(__file__).resolve().parents[2] / "docs"
SEEDS = [1, 2, 3]
SHORT = 300
PLATEAU = 0.9  # a run leaves the plateau at this share of the bits that word frequencies alone give

CURVES = 600  # updates of the figure on the first page
CURVE_RATE = 1e-3

SHOWN = ["post-ln", "reference", "constant", "pre-ln"]  # in the figure
SHOWN_RATES = [5e-4, 1e-3, 3e-3]
MOMENTS = [0, 1, 10, 100]

TITLES = {
    "post-ln": "Post-LN",
    "pre-ln": "Pre-LN",
    "reference": "Admin, `reference`",
    "constant": "Admin, `constant`",
    "log": "Admin, `log`",
    "paper": "Admin, `paper`",
    "deepnorm": "DeepNorm",
    "constant-folded": "Post-LN, `constant` folded in",
    "constant-frozen": "`constant`, omega frozen",
    "reference-x1.5": "1.5 × `reference`",
    "reference-x2": "2 × `reference`",
    "reference-x3": "3 × `reference`",
    "reference-warm-up-300": "`reference`, 300 updates of warm-up",
    "pre-ln-divided": "Pre-LN, branches divided by √S",
    "uniform": "`uniform`",
    "ahead": "`ahead`",
}
Row = dict[str, str]


def load(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def final(row: dict[str, Any]) -> float:
    """Bits after the last update; infinity for a run that diverged."""
    value = float(row.get(str(row["updates"])) or math.inf)
    return value if math.isfinite(value) else math.inf


def leaves(runs: list[Row]) -> bool:
    """Has every seed of the protocol run and left the plateau?"""
    return len(runs) == len(SEEDS) and all(final(run) <= PLATEAU * float(run["frequencies"]) for run in runs)


def limits(rows: list[Row]) -> list[Row]:
    """The methods by the highest rate up to which they leave the plateau."""
    short = grouped((row for row in rows if row["updates"] == str(SHORT)), "method", "rate")
    by_rate: dict[float, list[str]] = {}
    for name, title in TITLES.items():
        runs = sorted((float(rate), same) for (method, rate), same in short.items() if method == name)
        rates = [rate for rate, _ in takewhile(lambda at: leaves(at[1]), runs)]
        by_rate.setdefault(max(rates, default=0), []).append(title)
    titles = (f"after {SHORT} updates, off the plateau up to", "methods")
    cells = ((f"{rate:g}" if rate else "no rate", "; ".join(by_rate[rate])) for rate in sorted(by_rate))
    return [dict(zip(titles, row)) for row in cells]


def draw(rows: list[Row]) -> Any:
    """Var[f] at three rates, omega and β²_{i,i} against the sub-layer: a column a method, a line a moment."""
    drawn, panels = figure.panels(len(SHOWN), 6.6, rows=len(SHOWN_RATES) + 2, sharex=True, sharey="row")
    shades = dict(zip(MOMENTS, ["#bbbbbb", "#56B4E9", "#E69F00", "#000000"]))

    def plot(axes: Any, method: str, rate: float, update: int, quantity: str, **look: Any) -> None:
        at = (method, "" if update == 0 else f"{rate:g}", str(update))
        line = [row for row in rows if (row["method"], row["rate"] and f"{float(row['rate']):g}", row["updates"]) == at]
        for first, style in ((0, "-"), (1, ":")):  # attention, feed-forward
            numbers, values = zip(*[(int(row["sublayer"]), float(row[quantity])) for row in line[first::2]])
            axes.plot(numbers, values, style, **{"color": shades[update], "linewidth": 1.2, **look})

    for column, name in enumerate(SHOWN):
        for place, rate in enumerate(SHOWN_RATES):
            axes = panels[place * len(SHOWN) + column]
            for update in MOMENTS:
                plot(axes, name, rate, update, "variance", linewidth=1.2 if update else 3)
            axes.set_yscale("log")
            for offset, quantity in ((0, "omega"), (1, "share")):
                below = panels[(len(SHOWN_RATES) + offset) * len(SHOWN) + column]
                plot(below, name, rate, 100, quantity, linewidth=0.7 + 0.5 * place)
        for offset, (quantity, label) in enumerate((("omega", "mean ω"), ("share", "β²ᵢᵢ"))):
            below = panels[(len(SHOWN_RATES) + offset) * len(SHOWN) + column]
            plot(below, name, SHOWN_RATES[0], 0, quantity, linewidth=2)
            if column == 0:
                below.set_ylabel(label)
        panels[4 * len(SHOWN) + column].set_yscale("log")
        panels[column].set_title(TITLES[name].replace("`", ""))
        panels[-1 - column].set_xlabel("sub-layer")
    for place, rate in enumerate(SHOWN_RATES):
        panels[place * len(SHOWN)].set_ylabel(f"Var[f], {rate:g}")
    for update, colour in shades.items():
        panels[0].plot([], [], color=colour, label=f"{update} updates")
    panels[0].plot([], [], ":", color="black", label="dotted: feed-forward")
    drawn.legend(loc="outside lower center", ncols=len(MOMENTS) + 1)
    figure.set_title(
        drawn, "24 layers of torch.nn, seed 1. omega and β²: after 100 updates, the thicker the larger the rate"
    )
    return drawn


def draw_curves(rows: list[Row]) -> Any:
    """Held-out bits against updates: a line a seed, a colour a method."""
    drawn, (axes,) = figure.panels(1, 3.4)
    looks: dict[str, dict[str, Any]] = {
        "post-ln": {"color": figure.colour("post-ln")},
        "pre-ln": {"color": figure.colour("pre-ln")},
        "reference": {"color": figure.colour("admin"), "linestyle": "--"},
        "constant": {"color": figure.colour("admin")},
    }
    for name, look in looks.items():
        for seed in SEEDS:
            line = [row for row in rows if (row["method"], row["seed"]) == (name, str(seed))]
            label = TITLES[name].replace("`", "") if seed == SEEDS[0] else None
            axes.plot([int(r["update"]) for r in line], [float(r["bits"]) for r in line], label=label, **look)
    axes.axhline(float(rows[0]["frequencies"]), color="#808080", linewidth=0.8, label="word frequencies alone")
    axes.set(xlabel="updates", ylabel="bits a word, held out", ylim=(5, 9), xlim=(0, CURVES))
    axes.legend()
    figure.set_title(drawn, f"24 layers of nn.TransformerEncoder, AdamW at {CURVE_RATE:g}, three seeds")
    return drawn
