"""Check the claims of docs/protocol-omega.md, from the rows of its own runs and of the first protocol's runs.

    python -m recipes.figures.omega_rules docs/rows/protocol.csv docs/rows/protocol-omega.csv -o protocol-omega.png

This prints the bridge and each comparison whose runs are complete, and draws every run. Pilot runs do not count. The
comparison at 18L-18L needs the bridge, because its other runs are the first protocol's.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from fairseq_admin.analysis.figure import COLOURS
from recipes.compare.intervals import NOT_SHOWN, Interval, contrast, judged
from recipes.compare.outcome import EXPLODED, loss
from recipes.compare.rows import Row, read_results, sizes
from recipes.figures.drawing import BITS, draw_runs, loss_axes, save, subplots
from recipes.figures.protocol import MISSING
from recipes.steps.common import run

SEEDS = {"18": tuple("456789"), "60-12": tuple("456")}
"""The seeds at each depth."""
METHODS = ("constant", "reference", "pre-ln")
EARLY = (750, 1000, 1250)
BRIDGE = 0.02
"""Runs of the first protocol count if the same runs at the new commit differ by at most this many bits."""
Groups = dict[tuple[str, str], dict[str, Row]]
"""Runs by depth and method, then by seed."""


def groups_of(rows: Sequence[Row]) -> Groups:
    groups: Groups = {}
    for row in rows:
        method = row.get("rule") or {"admin": "reference"}.get(row["scheme"], row["scheme"])
        if method in METHODS and row["seed"] in SEEDS.get(row["layers"], ()):
            groups.setdefault((row["layers"], method), {})[row["seed"]] = row
    return groups


def early_loss(row: Row) -> float:
    """The mean of the validations at EARLY.

    A validation above 1.5 H counts as 1.5 H, and so does one that is missing after a divergence.
    """
    return fmean(min(row["valid"].get(update, math.inf), EXPLODED * row["entropy"]) for update in EARLY)


def difference(groups: Groups, layers: str, method: str, measure: Callable[[Row], float] = loss) -> Interval | None:
    """`constant` minus another method (Welch's interval); None if a run is missing."""
    both = [groups.get((layers, name), {}) for name in ("constant", method)]
    if any(len(runs) < len(SEEDS[layers]) for runs in both):
        return None
    return contrast([(weight, list(map(measure, runs.values()))) for weight, runs in zip((1, -1), both)])


def claims(old: Groups, new: Groups) -> Iterator[str]:
    """A line for the bridge, and one for each comparison in the protocol's order.

    At each depth, the first comparison whose verdict is "not shown" or whose runs are missing is the last.
    """
    again = new.get(("18", "reference"), {})
    apart = [abs(loss(row) - loss(old["18", "reference"][seed])) for seed, row in again.items()]
    holds = len(apart) == 2 and max(apart) <= BRIDGE
    verdict = f"up to {max(apart):.3f} bits, {'it holds' if holds else 'it fails'}" if len(apart) == 2 else MISSING
    yield f"Bridge: {verdict}"
    at_18 = {**new, **old} if holds else {}
    for layers in SEEDS:
        groups = at_18 if layers == "18" else new
        for method in METHODS[1:]:
            interval = difference(groups, layers, method)
            verdict = f"{judged(interval, True)}: {interval:+.3f} bits" if interval else MISSING
            yield f"constant - {method} at {sizes(layers)}: {verdict}"
            if verdict.startswith((NOT_SHOWN, MISSING)):
                break
    early, end = (difference(at_18, "18", "reference", measure) for measure in (early_loss, loss))
    if early and end:
        verdict = "shown" if early.high < 0 < end.low else NOT_SHOWN
        yield f"Begins ahead, ends behind: {verdict}; updates 750 to 1,250: {early:+.3f} bits"


def draw(groups: Groups) -> Figure:
    """The losses of every run, in a panel for each depth."""
    depths = [layers for layers in SEEDS if any(at == layers for at, _ in groups)]
    figure, ((*panels,),) = subplots(1, len(depths), (4.2 * len(depths) + 2.6, 4.6))
    rows = [row for runs in groups.values() for row in runs.values()]
    for (layers, method), runs in groups.items():
        colour = COLOURS[METHODS.index(method)]
        draw_runs(panels[depths.index(layers)], [*runs.values()], method, color=colour)
    loss_axes(panels, [bits for row in rows for bits in row["valid"].values()], rows[0]["entropy"])
    for axes, layers in zip(panels, depths):
        axes.set(title=f"{sizes(layers)} (thin: seeds, thick: mean)", xlabel="updates")
        axes.legend(frameon=False, fontsize="small")
    panels[0].set_ylabel(BITS)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("old", type=Path, help="rows of the first protocol")
    parser.add_argument("new", type=Path, help="rows of this protocol")
    parser.add_argument("-o", "--figure", type=Path)
    args = parser.parse_args()
    old, new = (groups_of(read_results([path])) for path in (args.old, args.new))
    print("\n".join(claims(old, new)))
    if args.figure:
        save(draw({**new, **old}), args.figure)


if __name__ == "__main__":
    run(main)
