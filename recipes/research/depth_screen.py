"""Does one learning rate serve every depth? The language model's runs of docs/protocol-depth.md.

    OMP_NUM_THREADS=1 python -m recipes.research.depth_screen kappa       # runs of part 1 that the rows lack
    OMP_NUM_THREADS=1 python -m recipes.research.depth_screen transfer    # the same for part 2
    python -m recipes.research.depth_screen table                         # tables and verdicts, from the rows

The model, its text and its batches are those of nn_transformer.py, at several depths. A branch is divided by one number
where it is written, which is what `admin.attach` does: LN(x + f / omega) = LN(omega x + f). A finished run is a row at
once, so the program can be stopped at any time and goes on where it was.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression, mean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from docs.examples.nn_transformer import BATCH, WARM_UP, LanguageModel, frequencies_alone, loss, read
from recipes.research.intervals import with_interval
from recipes.research.omega_screen import DOCS, final, load
from recipes.steps.results import commit

FIELDS = "part method layers rate seed updates 100 300 600 frequencies commit seconds".split()
VALIDATED = [100, 300, 600]

METHODS: dict[str, tuple[str, bool, Callable[[int], float]]] = {
    "constant": ("ω = √S", False, lambda n: math.sqrt(2 * n)),
    "2-constant": ("ω = 2√S", False, lambda n: 2 * math.sqrt(2 * n)),
    "linear-12": ("ω = S/12", False, lambda n: max(1.0, 2 * n / 12)),
    "linear-6": ("ω = S/6", False, lambda n: max(1.0, 2 * n / 6)),
    "linear-root12": ("ω = S/√12", False, lambda n: max(1.0, 2 * n / math.sqrt(12))),
    "linear-2": ("ω = S/2", False, lambda n: max(1.0, 2 * n / 2)),
    "pre-ln": ("Pre-LN", True, lambda n: 1.0),
    "pre-ln-1": ("Pre-LN, branches × 1/L", True, lambda n: n),
    "pre-ln-6": ("Pre-LN, branches × 6/L", True, lambda n: n / 6),
}
"""Title, whether the norms come first, and what divides each branch of a stack of n layers (S = 2n, L = n)."""

RULES = ["linear-12", "linear-6", "linear-root12", "linear-2"]  # from the smallest κ to the largest
PRE_LNS = ["pre-ln-1", "pre-ln-6"]
RATES = [1e-3, 2e-3, 4e-3, 8e-3]
SMALL, LARGE = 6, 48  # the rate is tuned at the first depth and used at the second
DEEPEST = 96
KAPPA_MARGIN, CARRIES_OVER = 0.05, 0.03  # bits
PLATEAU = 0.9  # a run leaves the plateau at this share of the bits that word frequencies alone give

Row = dict[str, Any]
Run = tuple[str, int, float, int]
"""Method, layers, rate, seed."""


@dataclass(frozen=True)
class Part:
    """A part of the protocol: every method at every depth, with every seed."""

    name: str
    methods: list[str]
    layers: list[int]
    seeds: list[int]
    updates: int


def divide(model: LanguageModel, omega: float) -> None:
    """Divide every branch by ω where it is written. (Dropout is 0, so the last linear layer writes it.)"""

    def attention(module: nn.Module, inputs: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return output[0] / omega, *output[1:]

    for layer in model.encoder.layers:
        layer.self_attn.register_forward_hook(attention)
        layer.linear2.register_forward_hook(lambda module, inputs, output: output / omega)


@torch.no_grad()
def bits(model: nn.Module, valid: Tensor) -> float:
    """Bits a word held out."""
    model.eval()
    value = loss(model, valid).item() / math.log(2)
    model.train()
    return value


def train_one(method: str, layers: int, rate: float, seed: int, updates: int, texts: list[Tensor]) -> Row:
    """Train one model. Returns the bits a word held out; a run ends early where they are not a finite number."""
    train, valid = texts
    torch.manual_seed(seed)
    _, norm_first, divisor = METHODS[method]
    model = LanguageModel(layers, norm_first)
    if divisor(layers) != 1:
        divide(model, divisor(layers))
    batches = [train[torch.randint(len(train), (BATCH,))] for _ in range(updates)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: min(1, (update + 1) / WARM_UP))
    held_out = {}
    for update, batch in enumerate(batches, 1):
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        schedule.step()
        if update in VALIDATED:
            value = bits(model, valid)
            held_out[str(update)] = f"{value:.4f}"
            if not math.isfinite(value):
                break
    return held_out


# -- the rows ----------------------------------------------------------------------------------------------------------


def outcomes(rows: Sequence[Row], part: str) -> dict[tuple[str, int], dict[float, dict[int, float]]]:
    """Bits by method and layers, then rate, then seed.

    Raises:
        ValueError: the rows are of different texts.
    """
    if len({row["frequencies"] for row in rows}) > 1:
        raise ValueError("the rows are of different texts (frequencies); expected one: Python's version makes it.")
    grouped: dict[tuple[str, int], dict[float, dict[int, float]]] = {}
    for row in rows:
        if row["part"] == part:
            rates = grouped.setdefault((row["method"], int(row["layers"])), {})
            rates.setdefault(float(row["rate"]), {})[int(row["seed"])] = final(row)
    return grouped


def best(rates: dict[float, dict[int, float]]) -> float:
    """The rate with the fewest bits, a mean over the seeds; of equal ones the lower."""
    return min(sorted(rates), key=lambda rate: mean(rates[rate].values()))


def missing(rows: Sequence[Row], part: Part) -> list[Run]:
    """The runs of a part that can be made now and have no row, depth by depth.

    While the best of a method at a depth is at the edge of its rates, there is one more. The best rate at SMALL is one
    of the rates at every depth.
    """
    done, todo = outcomes(rows, part.name), []
    for layers in part.layers:
        for method in part.methods:
            rates, scores = list(RATES), done.get((method, layers), {})
            if layers != SMALL and (carried := best(done[method, SMALL])) not in rates:
                rates = sorted([*rates, carried])
            while True:
                runs = [(method, layers, rate, seed) for rate in rates for seed in part.seeds]
                runs = [run for run in runs if run[3] not in scores.get(run[2], {})]
                todo += runs
                if runs:
                    break
                at = best({rate: scores[rate] for rate in rates})
                if at not in (rates[0], rates[-1]):
                    break
                rates = [at / 2, *rates] if at == rates[0] else [*rates, at * 2]
        if todo:  # the best rates at SMALL come first, and the first depths decide
            break
    return todo


def make_runs(path: Path, part: Part, seeds: Sequence[int]) -> None:
    """Make every run of a part that has no row, of some seeds."""
    if not path.exists():
        path.write_text(",".join(FIELDS) + "\n")
    texts, at = read(), commit()
    plateau = f"{frequencies_alone(*texts):.4f}"
    while todo := [run for run in missing(load(path), part) if run[3] in seeds]:
        method, layers, rate, seed = todo[0]
        began = time.monotonic()
        row: Row = {"part": part.name, "method": method, "layers": layers, "rate": rate, "seed": seed}
        row |= {"updates": part.updates, **train_one(method, layers, rate, seed, part.updates, texts)}
        row |= {"frequencies": plateau, "commit": at, "seconds": round(time.monotonic() - began)}
        with path.open("a", newline="") as file:
            csv.DictWriter(file, FIELDS, lineterminator="\n").writerow(row)
        print(f"{part.name} {method} {layers} layers {rate:g} seed {seed}: {final(row):.3f} bits", flush=True)


# -- the verdicts ------------------------------------------------------------------------------------------------------


def carried(rows: Sequence[Row], rule: str) -> tuple[float, float] | None:
    """Bits at 96 layers: at the best rate of 6 layers, and at the best rate there. None: runs are missing."""
    done = outcomes(rows, "kappa")
    small, large = done.get((rule, SMALL)), done.get((rule, DEEPEST))
    return (large[best(small)][1], large[best(large)][1]) if small and large and best(small) in large else None


def chosen_kappa(rows: Sequence[Row]) -> str | None:
    """The κ with the fewest bits at 96 layers at its best rate of 6 layers, which the protocol's change says.

    None: runs are missing.
    """
    bits = {rule: at[0] for rule in RULES if (at := carried(rows, rule))}
    return min(bits, key=bits.__getitem__) if len(bits) == len(RULES) else None


def smallest_kappa(rows: Sequence[Row]) -> str | None:
    """By the protocol's first version: the smallest κ whose best rate at 6 layers costs at most 0.05 bits at 96."""
    costs = {rule: at[0] - at[1] for rule in RULES if (at := carried(rows, rule))}
    return next((rule for rule, cost in costs.items() if cost <= KAPPA_MARGIN), None)


def chosen_pre_ln(rows: Sequence[Row]) -> str:
    """The factor of Pre-LN's branches that has fewer bits at 24 layers, each at its best rate."""
    done = outcomes(rows, "pre-ln")
    return min(PRE_LNS, key=lambda name: min(scores[1] for scores in done[name, 24].values()))


def regrets(scores: dict[tuple[str, int], dict[float, dict[int, float]]], method: str) -> list[float]:
    """What the best rate at 6 layers costs at 48 layers next to the best rate there: bits, one for each seed."""
    small, large = scores[method, SMALL], scores[method, LARGE]
    return [large[best(small)][seed] - value for seed, value in large[best(large)].items()]


def optimum(rates: dict[float, float], most: float) -> float:
    """The logarithm (base 2) of the best rate: the lowest point of a quadratic through the runs off the plateau.

    Args:
        rates: bits by rate, of one seed.
        most: bits at which a run has left the plateau.

    Returns:
        NaN if fewer than three runs have, or the quadratic has no lowest point.
    """
    points = [(math.log2(rate), value) for rate, value in rates.items() if value <= most]
    if len(points) < 3:
        return math.nan
    x, y = zip(*points)
    a, b, _ = np.polyfit(x, y, 2)
    return float(-b / (2 * a)) if a > 0 else math.nan


def slopes(rows: Sequence[Row], method: str, part: Part) -> list[float]:
    """The exponent of the best rate in S, one for each seed; NaN: see `optimum`."""
    scores, most = outcomes(rows, part.name), PLATEAU * float(rows[0]["frequencies"])
    lines = []
    for seed in part.seeds:
        at = [optimum({rate: v[seed] for rate, v in scores[method, n].items()}, most) for n in part.layers]
        finite = all(map(math.isfinite, at))
        lines.append(linear_regression([math.log2(2 * n) for n in part.layers], at).slope if finite else math.nan)
    return lines


def transfer(rows: Sequence[Row]) -> Part:
    """Part 2, with the κ and the factor that part 1 chose."""
    kappa = chosen_kappa(rows)
    if kappa is None:
        raise ValueError("part 1 has chosen no κ; expected all of its rows. Run `kappa` first.")
    methods = [kappa, "constant", "2-constant", "pre-ln", chosen_pre_ln(rows)]
    return Part("transfer", methods, [SMALL, 12, 24, LARGE], [2, 3, 4], 600)


KAPPA = Part("kappa", [*RULES, "constant", "2-constant"], [SMALL, DEEPEST, 24], [1], 300)
PRE_LN = Part("pre-ln", PRE_LNS, [SMALL, 24], [1], 300)


def table(rows: Sequence[Row], part: Part) -> str:
    """Mean bits by method, layers and rate; bold: the best."""
    scores = outcomes(rows, part.name)
    rates = sorted({rate for values in scores.values() for rate in values})
    lines = [
        f"| {part.updates} updates | layers | {' | '.join(f'{rate:g}' for rate in rates)} |",
        "|---" * (len(rates) + 2) + "|",
    ]
    for (method, layers), values in sorted(
        scores.items(), key=lambda item: (list(METHODS).index(item[0][0]), item[0][1])
    ):
        at = best(values)
        cells = [f"{mean(values[rate].values()):.2f}" if rate in values else "" for rate in rates]
        cells = [f"**{cell}**" if rate == at else cell for rate, cell in zip(rates, cells)]
        lines.append(f"| {METHODS[method][0]} | {layers} | {' | '.join(cells)} |")
    return "\n".join(lines)


def interval(values: Sequence[float]) -> str:
    return with_interval(values, "+.3f") if all(map(math.isfinite, values)) else "not determined"


def verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """The lines of parts 1 and 2, as far as their runs are there."""
    if missing(rows, KAPPA) or missing(rows, PRE_LN):
        yield "Part 1: not all of its runs are there"
        return
    kappa = chosen_kappa(rows)
    titles = [METHODS[rule][0] if rule else "none" for rule in (kappa, smallest_kappa(rows))]
    yield f"κ: {titles[0]} (first version: {titles[1]}); Pre-LN: {METHODS[chosen_pre_ln(rows)][0]}"
    if kappa is None or missing(rows, part := transfer(rows)):
        yield "Part 2: not all of its runs are there"
        return
    scores = outcomes(rows, part.name)
    for method in part.methods:
        costs, exponents = regrets(scores, method), slopes(rows, method, part)
        verdict = "the rate carries over" if mean(costs) <= CARRIES_OVER else "the rate does not carry over"
        yield f"{METHODS[method][0]}: regret {interval(costs)} bits, {verdict}; exponent {interval(exponents)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=["kappa", "transfer", "table"])
    parser.add_argument("--csv", type=Path, default=DOCS / "rows/depth.csv")
    parser.add_argument("--seed", nargs="+", type=int, default=[1, 2, 3, 4], help="make the runs of these seeds alone")
    args = parser.parse_args()
    if args.command == "kappa":
        for part in (KAPPA, PRE_LN):
            make_runs(args.csv, part, args.seed)
    elif args.command == "transfer":
        make_runs(args.csv, transfer(load(args.csv)), args.seed)
    else:
        rows = load(args.csv)
        for name, updates in (("kappa", 300), ("pre-ln", 300), ("transfer", 600)):
            if outcomes(rows, name):
                print(table(rows, Part(name, [], [], [], updates)), end="\n\n")
        print(*verdicts(rows), sep="\n")


if __name__ == "__main__":
    main()
