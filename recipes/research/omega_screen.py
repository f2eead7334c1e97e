"""Which rules for omega leave the plateau? The screen of docs/protocol-omega.md, and Var[f] as training begins.

    OMP_NUM_THREADS=1 python -m recipes.research.omega_screen run           # runs that docs/rows/omega-screen.csv lacks
    OMP_NUM_THREADS=1 python -m recipes.research.omega_screen variances     # docs/rows/omega-variances.csv
    python -m recipes.research.omega_screen table                           # its tables in markdown, from the rows
    OMP_NUM_THREADS=1 python -m recipes.research.omega_screen curves        # runs that docs/rows/24-layers.csv lacks
    python -m recipes.research.omega_screen plot                            # the two figures, in docs/images

The model, its text and its batches are those of nn_transformer.py. A finished run is a row at once, so `run` can be
stopped at any time and goes on where it was.
"""

from __future__ import annotations

import argparse
import copy
import csv
import math
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib
import torch
from torch import Tensor, nn

import fairseq_admin.pytorch as admin
from docs.examples.nn_transformer import BATCH, WARM_UP, LanguageModel, frequencies_alone, loss, read
from fairseq_admin.analysis import figure

DOCS = Path(__file__).resolve().parents[2] / "docs"
LAYERS = 24
RATES = [5e-4, 1e-3, 2e-3, 3e-3]
SEEDS = [1, 2, 3]
SHORT, LONG = 300, 1500
VALIDATED = [100, 300, 500, 1000, 1500]
PLATEAU = 0.9  # a run leaves the plateau at this share of the bits that word frequencies alone give
FIELDS = ["method", "rule", "rate", "seed", "updates", *map(str, VALIDATED), "frequencies", "commit", "seconds"]

CURVES = 600  # updates of the figure on the first page
CURVE_EVERY = 25
CURVE_RATE = 1e-3
CURVE_FIELDS = ["method", "rule", "rate", "seed", "update", "bits", "frequencies", "commit"]

SHOWN = ["post-ln", "reference", "constant", "pre-ln"]  # in the figure
SHOWN_RATES = [5e-4, 1e-3, 3e-3]
MOMENTS = [0, 1, 10, 100]


def norms_with_omega(model: nn.Module) -> list[Any]:
    """The norms of an attached model, in forward order."""
    return [module for module in model.modules() if hasattr(module, "omega_init")]


def branches(model: LanguageModel) -> Iterator[tuple[Any, nn.Module, nn.Module, nn.Module]]:
    """Of each sub-layer: its norm, the first module of its branch, the last, and the last that has weights."""
    for layer in model.encoder.layers:
        yield layer.norm1, layer.self_attn, layer.dropout1, layer.self_attn.out_proj
        yield layer.norm2, layer.linear1, layer.dropout2, layer.linear2


def by_depth(model: LanguageModel, batches: list[Tensor], rate: float, rule: str) -> None:
    """Admin by a rule that knows only the depth."""
    admin.attach(model, batches[0][:, :-1], omega=rule)


def by_profile(model: LanguageModel, batches: list[Tensor], rate: float, rule: str, factor: float = 1.0) -> None:
    """Admin by a profile of the first batch, times a factor."""
    admin.attach(model, batches[0][:, :-1], omega="constant")
    admin.profile(model, batches[0][:, :-1], rule=rule)  # in place of the constant
    for norm in norms_with_omega(model):
        norm.omega_init *= factor


def folded(model: LanguageModel, batches: list[Tensor], rate: float) -> None:
    """Post-LN that starts as the same function as Admin by `constant`, and has no omega."""
    by_depth(model, batches, rate, "constant")
    admin.fold(model)


def frozen(model: LanguageModel, batches: list[Tensor], rate: float) -> None:
    """Admin by `constant` whose omega is not trained."""
    by_depth(model, batches, rate, "constant")
    for norm in norms_with_omega(model):
        norm.omega_delta.requires_grad_(False)


@torch.no_grad()
def deepnorm(model: LanguageModel, batches: list[Tensor], rate: float) -> None:
    """DeepNorm of an encoder: shortcuts times (2N)^(1/4); values, outputs and feed-forward start (8N)^(-1/4) times.

    Wang et al. 2022, "DeepNet", figure 2.
    """
    frozen(model, batches, rate)
    for norm in norms_with_omega(model):
        norm.omega_init.fill_((2 * LAYERS) ** 0.25)
    gain = (8 * LAYERS) ** -0.25
    for layer in model.encoder.layers:
        layer.self_attn.in_proj_weight[-layer.self_attn.embed_dim :] *= gain  # the values' rows
        for linear in (layer.self_attn.out_proj, layer.linear1, layer.linear2):
            linear.weight *= gain


@torch.no_grad()
def divided(model: LanguageModel, batches: list[Tensor], rate: float) -> None:
    """Branches whose outputs start divided by the root of the number of sub-layers."""
    for _, _, _, last in branches(model):
        for parameter in last.parameters():
            parameter.div_(math.sqrt(2 * LAYERS))


def uniform(model: LanguageModel, batches: list[Tensor], rate: float) -> None:
    """Admin with the last sub-layer's omega by `reference` in all sub-layers."""
    by_profile(model, batches, rate, "reference")
    norms = norms_with_omega(model)
    for norm in norms:
        norm.omega_init.copy_(norms[-1].omega_init)


def ahead(model: LanguageModel, batches: list[Tensor], rate: float) -> None:
    """Admin by `reference`, measured on the first batch after eight steps at the full rate on a copy."""
    by_profile(model, batches, rate, "reference")
    trial = copy.deepcopy(model)
    optimizer = optimizer_of(trial, rate)
    for batch in batches[:8]:
        step(trial, batch, optimizer)
    omegas = [1.0]

    def measure(norm: Any, x: Tensor, f: Tensor) -> None:
        norm.omega_delta.data.zero_()
        norm.omega_init.fill_(omegas[-1])
        omegas.append(math.sqrt(omegas[-1] ** 2 * x.var().item() + f.var().item()))

    observe(trial, batches[0], measure)
    for norm, omega in zip(norms_with_omega(model), omegas):
        norm.omega_init.fill_(omega)


@dataclass(frozen=True)
class Method:
    title: str
    rule: str = ""
    prepare: Callable[[LanguageModel, list[Tensor], float], object] = lambda model, batches, rate: None
    norm_first: bool = False
    warm_up: int = WARM_UP


REFERENCE = partial(by_profile, rule="reference")
METHODS = {
    "post-ln": Method("Post-LN"),
    "pre-ln": Method("Pre-LN", norm_first=True),
    "reference": Method("Admin, `reference`", "reference", REFERENCE),
    "constant": Method("Admin, `constant`", "constant", partial(by_depth, rule="constant")),
    "log": Method("Admin, `log`", "log", partial(by_depth, rule="log")),
    "paper": Method("Admin, `paper`", "paper", partial(by_profile, rule="paper")),
    "deepnorm": Method("DeepNorm", "", deepnorm),
    "constant-folded": Method("Post-LN, `constant` folded in", "constant", folded),
    "constant-frozen": Method("`constant`, omega frozen", "constant", frozen),
    "reference-x1.5": Method("1.5 × `reference`", "reference", partial(REFERENCE, factor=1.5)),
    "reference-x2": Method("2 × `reference`", "reference", partial(REFERENCE, factor=2.0)),
    "reference-x3": Method("3 × `reference`", "reference", partial(REFERENCE, factor=3.0)),
    "reference-warm-up-300": Method("`reference`, 300 updates of warm-up", "reference", REFERENCE, warm_up=300),
    "pre-ln-divided": Method("Pre-LN, branches divided by √S", "", divided, norm_first=True),
    "uniform": Method("`uniform`", "uniform", uniform),
    "ahead": Method("`ahead`", "ahead", ahead),
}


def optimizer_of(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98))


def step(model: nn.Module, batch: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss(model, batch).backward()
    optimizer.step()


def training(method: Method, rate: float, seed: int, updates: int, train: Tensor) -> Iterator[tuple[int, Any, Tensor]]:
    """Train one model. Yields the number of updates made, the model and the first batch; before the first update, too.

    A longer run begins as a shorter one.
    """
    torch.manual_seed(seed)
    model = LanguageModel(LAYERS, method.norm_first)
    batches = [train[torch.randint(len(train), (BATCH,))] for _ in range(updates)]
    method.prepare(model, batches, rate)
    optimizer = optimizer_of(model, rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: min(1, (update + 1) / method.warm_up))
    yield 0, model, batches[0]
    for update, batch in enumerate(batches, 1):
        step(model, batch, optimizer)
        schedule.step()
        yield update, model, batches[0]


@torch.no_grad()
def bits(model: nn.Module, valid: Tensor) -> float:
    """Bits a word held out."""
    model.eval()
    value = loss(model, valid).item() / math.log(2)
    model.train()
    return value


def run(name: str, rate: float, seed: int, updates: int, train: Tensor, valid: Tensor) -> dict[str, Any]:
    """Train one model. Returns its row; a run ends early where the held-out loss is not a finite number."""
    began = time.monotonic()
    row: dict[str, Any] = {"method": name, "rule": METHODS[name].rule, "rate": rate, "seed": seed, "updates": updates}
    for update, model, _ in training(METHODS[name], rate, seed, updates, train):
        if update in {*VALIDATED, updates} - {0}:
            row[str(update)] = f"{bits(model, valid):.4f}"
            if not math.isfinite(float(row[str(update)])):
                break
    row |= {"frequencies": f"{frequencies_alone(train, valid):.4f}", "seconds": round(time.monotonic() - began)}
    return row


def key(row: dict[str, Any]) -> tuple[str, float, int, int]:
    return row["method"], float(row["rate"]), int(row["seed"]), int(row["updates"])


def final(row: dict[str, Any]) -> float:
    """Bits after the last update; infinity for a run that diverged."""
    value = float(row.get(str(row["updates"])) or math.inf)
    return value if math.isfinite(value) else math.inf


def outcomes(rows: list[dict[str, Any]], updates: int) -> dict[tuple[str, float], list[float]]:
    """Bits of each seed by method and rate."""
    grouped: dict[tuple[str, float], list[float]] = {}
    for row in sorted(rows, key=key):
        if int(row["updates"]) == updates:
            grouped.setdefault((row["method"], float(row["rate"])), []).append(final(row))
    return grouped


def runs(name: str, rate: float, updates: int) -> list[tuple[str, float, int, int]]:
    """The keys of a method's runs at a rate, one for each seed."""
    return [(name, rate, seed, updates) for seed in SEEDS]


def missing(rows: list[dict[str, Any]]) -> list[tuple[str, float, int, int]]:
    """The runs of the protocol that have no row, in their order: first all short ones, whose bests choose the rest.

    A method whose best rate is at the edge of its rates gets one more.
    """
    done = set(map(key, rows))
    scores = {at: mean(values) for at, values in outcomes(rows, SHORT).items()}
    todo, longer = [], []
    for name in METHODS:
        rates = list(RATES)
        while not (short := [run for rate in rates for run in runs(name, rate, SHORT) if run not in done]):
            best = min(rates, key=lambda rate: scores[name, rate])
            if best == rates[0]:
                rates.insert(0, best / 2)
            elif best == rates[-1]:
                rates.append(best * 2)
            else:
                longer += [run for run in runs(name, best, LONG) if run not in done]
                break
        todo += short
    return sorted(todo or longer, key=lambda run: run[2])  # by seed


def observe(model: LanguageModel, batch: Tensor, measure: Callable[[Any, Tensor, Tensor], object]) -> None:
    """Run a batch without gradients and call `measure` with the norm, the branch's input and its output, in order."""
    inputs: list[Tensor] = []

    def after(norm: Any, last: nn.Module, args: tuple, f: Tensor) -> None:
        measure(norm, inputs.pop(), f)

    handles = []
    for norm, first, last, _ in branches(model):
        handles.append(first.register_forward_pre_hook(lambda _, args: inputs.append(args[0])))
        handles.append(last.register_forward_hook(partial(after, norm)))
    with torch.no_grad():
        model(batch[:, :-1])
    for handle in handles:
        handle.remove()


def own_share(f: Tensor, total: Tensor, weight: Tensor | float, output: Tensor) -> float:
    """β²_{i,i}: the share of a sub-layer's output that is its own branch's (docs/analysis.md), a mean over positions.

    Args:
        f: the branch's output, shape (B, T, C).
        total: the sum of shortcut and branch. Likewise.
        weight: the weight of the norm that follows, shape (C,); where none does, the output's deviation.
        output: what the sub-layer gives. Shape (B, T, C).
    """
    part = (f - f.mean(-1, keepdim=True)) * weight / total.std(-1, correction=0, keepdim=True)
    return (part.var(-1, correction=0) / output.var(-1, correction=0)).mean().item()


def sublayers(model: LanguageModel, batch: Tensor, norm_first: bool) -> list[dict[str, Any]]:
    """Var[f], the mean of ω and β²_{i,i} of each sub-layer on a batch."""
    norms: list[Any] = []
    shortcuts: list[Tensor] = []
    fs: list[Tensor] = []

    def measure(norm: Any, x: Tensor, f: Tensor) -> None:
        norms.append(norm)
        shortcuts.append(x)
        fs.append(f)

    observe(model, batch, measure)
    rows = []
    x = model.norm(model.words(batch[:, :-1]) + model.positions.weight).detach()
    for i, (norm, shortcut, f) in enumerate(zip(norms, shortcuts, fs), 1):
        omega = (norm.omega_init + norm.omega_delta).detach() if hasattr(norm, "omega_init") else torch.ones(())
        if norm_first:
            x = x + f
            share = own_share(f, x, x.std(-1, correction=0, keepdim=True), x)
        else:
            total = shortcut * omega + f
            output = nn.functional.layer_norm(total, total.shape[-1:], norm.weight, norm.bias, norm.eps).detach()
            share = own_share(f, total, norm.weight.detach(), output)
        measured = {"variance": f.var().item(), "omega": omega.mean().item(), "share": share}
        rows.append({"sublayer": i, **{name: f"{value:.4g}" for name, value in measured.items()}})
    return rows


def variances(path: Path) -> None:
    """Measure the sub-layers of four methods as training begins, on its first batch, with seed 1."""
    train, _ = read()
    rows = []
    for name in SHOWN:
        for rate in SHOWN_RATES:
            for update, model, batch in training(METHODS[name], rate, 1, max(MOMENTS), train):
                if update in MOMENTS and not (update == 0 and rate != SHOWN_RATES[0]):
                    at = {"method": name, "rate": rate if update else "", "seed": 1, "updates": update}
                    rows += [{**at, **row} for row in sublayers(model, batch, METHODS[name].norm_first)]
            print(f"{name} {rate:g}", flush=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) + ["commit"], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, "commit": commit()} for row in rows)


def commit() -> str:
    command = ["git", "-C", str(DOCS), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def load(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def screen(path: Path) -> None:
    """Make every run that has no row."""
    if not path.exists():
        path.write_text(",".join(FIELDS) + "\n")
    train, valid = read()
    at = commit()
    while todo := missing(load(path)):
        name, rate, seed, updates = todo[0]
        row = {**run(name, rate, seed, updates, train, valid), "commit": at}
        with path.open("a", newline="") as file:
            csv.DictWriter(file, FIELDS, lineterminator="\n").writerow(row)
        print(f"{name} {rate:g} seed {seed}: {final(row):.2f} bits; {len(todo) - 1} runs to go", flush=True)


def curves(path: Path) -> None:
    """Append the held-out bits of every run of the first page's figure that has no rows."""
    if not path.exists():
        path.write_text(",".join(CURVE_FIELDS) + "\n")
    train, valid = read()
    plateau, at = frequencies_alone(train, valid), commit()
    done = {(row["method"], row["seed"]) for row in load(path)}
    for seed in SEEDS:
        for name in SHOWN:
            if (name, str(seed)) in done:
                continue
            run_settings = {"method": name, "rule": METHODS[name].rule, "rate": CURVE_RATE, "seed": seed, "commit": at}
            rows = []
            for update, model, _ in training(METHODS[name], CURVE_RATE, seed, CURVES, train):
                if update % CURVE_EVERY == 0:
                    value = {"update": update, "bits": f"{bits(model, valid):.4f}", "frequencies": f"{plateau:.4f}"}
                    rows.append({**run_settings, **value})
            with path.open("a", newline="") as file:
                csv.DictWriter(file, CURVE_FIELDS, lineterminator="\n").writerows(rows)
            print(f"{name} seed {seed}: {rows[-1]['bits']} bits", flush=True)


def bound(rows: list[dict[str, str]]) -> float:
    """The most bits at which a run has left the plateau."""
    return PLATEAU * float(rows[0]["frequencies"])


def leaves(values: list[float], most: float) -> bool:
    """Has every seed of the protocol run and left the plateau?"""
    return len(values) == len(SEEDS) and max(values) <= most


def limits(rows: list[dict[str, str]]) -> str:
    """The methods by the highest rate up to which they leave the plateau."""
    short = outcomes(rows, SHORT)
    by_rate: dict[float, list[str]] = {}
    for name, method in METHODS.items():
        rates = takewhile(lambda at: leaves(short[at], bound(rows)), sorted(at for at in short if at[0] == name))
        by_rate.setdefault(max((rate for _, rate in rates), default=0), []).append(method.title)
    lines = [f"| after {SHORT} updates, off the plateau up to | methods |", "| --- | --- |"]
    lines += [f"| {f'{rate:g}' if rate else 'no rate'} | {'; '.join(by_rate[rate])} |" for rate in sorted(by_rate)]
    return "\n".join(lines)


def table(rows: list[dict[str, str]]) -> str:
    """Bits of each seed by method and rate, bold where every seed of the protocol has run and leaves the plateau."""
    short, long = outcomes(rows, SHORT), outcomes(rows, LONG)
    rates = sorted({rate for _, rate in short})

    def cell(values: list[float]) -> str:
        text = ", ".join(f"{value:.2f}" for value in values)
        return f"**{text}**" if leaves(values, bound(rows)) else text

    lines = [
        f"| {SHORT} updates; bold: off the plateau, at most {bound(rows):.2f} | "
        + " | ".join(f"{rate:g}" for rate in rates)
        + f" | {LONG:,} updates |",
        "|---" * (len(rates) + 2) + "|",
    ]
    for name, method in METHODS.items():
        cells = [cell(short.get((name, rate), [])) for rate in rates]
        longest = [f"{cell(values)} at {rate:g}" for (other, rate), values in long.items() if other == name]
        lines.append(f"| {method.title} | {' | '.join(cells)} | {'; '.join(longest)} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, str]]) -> Any:
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
        panels[column].set_title(METHODS[name].title.replace("`", ""))
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


def draw_curves(rows: list[dict[str, str]]) -> Any:
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
            label = METHODS[name].title.replace("`", "") if seed == SEEDS[0] else None
            axes.plot([int(r["update"]) for r in line], [float(r["bits"]) for r in line], label=label, **look)
    axes.axhline(float(rows[0]["frequencies"]), color="#808080", linewidth=0.8, label="word frequencies alone")
    axes.set(xlabel="updates", ylabel="bits a word, held out", ylim=(5, 9), xlim=(0, CURVES))
    axes.legend()
    figure.set_title(drawn, f"24 layers of nn.TransformerEncoder, AdamW at {CURVE_RATE:g}, three seeds")
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=["run", "variances", "curves", "table", "plot"])
    parser.add_argument("--csv", type=Path, default=DOCS / "rows/omega-screen.csv")
    parser.add_argument("--variances", type=Path, default=DOCS / "rows/omega-variances.csv")
    parser.add_argument("--curves", type=Path, default=DOCS / "rows/24-layers.csv")
    args = parser.parse_args()
    if args.command == "run":
        screen(args.csv)
    elif args.command == "variances":
        variances(args.variances)
    elif args.command == "curves":
        curves(args.curves)
    elif args.command == "table":
        print(table(load(args.csv)), limits(load(args.csv)), sep="\n\n")
    else:
        drawings = {"omega-variances": (draw, args.variances, 130), "24-layers": (draw_curves, args.curves, 180)}
        for name, (make, rows, dpi) in drawings.items():
            png = DOCS / f"images/{name}.png"
            with matplotlib.rc_context(figure.LOOK):
                make(load(rows)).savefig(png, dpi=dpi)
            figure.few_colours(png)


if __name__ == "__main__":
    main()
