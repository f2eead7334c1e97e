"""Public reports of models that do not train, as small models of our own: with each rule, as Pre-LN, and by diagnose.

    OMP_NUM_THREADS=1 python -m recipes.research.cases run       # every run that docs/rows/cases.csv lacks
    python -m recipes.research.cases table                       # the table in markdown, from the rows

The reports are named by number in docs/cases.md; nothing of theirs is in here. A finished run is a row at once.
"""

from __future__ import annotations

import argparse
import csv
import math
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

import fairseq_admin.pytorch as admin

DOCS = Path(__file__).resolve().parents[2] / "docs"
LAYERS, LENGTH, BATCH, WORDS = 12, 16, 16, 32
UPDATES = 300
RATE = 1e-3
METHODS = ["stock", "reference", "log", "constant", "pre-ln"]
SEEDS = [1, 2, 3]
LEARNS = 0.9  # of the plateau's loss, at most
FIELDS = "case method seed rule rate warm_up loss plateau advice commit seconds".split()

Batch = tuple[Tensor, Tensor]  # what the model reads, and its targets; a target of -100 does not count


class Model(nn.Module):
    """Embeddings, or one linear map for numbers, with positions; torch's encoder as torch makes it; a linear map."""

    def __init__(self, words: int, outputs: int, norm_first: bool, width: int = 32, hidden: int = 2048) -> None:
        super().__init__()
        self.read: nn.Module = nn.Embedding(words, width) if words else nn.Linear(1, width)
        self.positions = nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, hidden, 0.0, batch_first=True, norm_first=norm_first)
        last = nn.LayerNorm(width) if norm_first else None
        self.encoder = nn.TransformerEncoder(layer, LAYERS, last, enable_nested_tensor=False)
        self.out = nn.Linear(width, outputs)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.out(self.encoder(self.read(x) + self.positions.weight, mask, is_causal=mask is not None))


class CausalModel(Model):
    """The encoder with the initial weights of nn.Transformer: Xavier's, drawn for each layer."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__(WORDS, WORDS, norm_first, 64, 256)
        for weight in self.encoder.parameters():
            if weight.dim() > 1:
                nn.init.xavier_uniform_(weight)


class Translator(nn.Module):
    """nn.Transformer with 18 encoder layers and 1 decoder layer; source and target share words and positions."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS + 1, 64), nn.Embedding(LENGTH, 64)
        self.transformer = nn.Transformer(64, 4, 18, 1, 256, 0.0, batch_first=True, norm_first=norm_first)
        self.out = nn.Linear(64, WORDS)

    def forward(self, source: Tensor, previous: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        source, previous = (self.words(ids) + self.positions.weight for ids in (source, previous))
        return self.out(self.transformer(source, previous, tgt_mask=mask, tgt_is_causal=True))


def count_ones(generator: torch.Generator) -> Batch:
    x = torch.randint(2, (BATCH, LENGTH), generator=generator)
    return x, x.sum(1)


def waves(generator: torch.Generator) -> Batch:
    """A sine of any phase and one of three lengths, and its next values."""
    phase = torch.rand(BATCH, 1, generator=generator) * 2 * math.pi
    speed = 0.3 + 0.2 * torch.randint(3, (BATCH, 1), generator=generator)
    x = math.sqrt(2) * torch.sin(phase + speed * torch.arange(LENGTH + 1))
    return x[:, :-1, None], x[:, 1:, None]


def motifs(generator: torch.Generator) -> Batch:
    """Four words of 32, four times over, of which a quarter is masked (word 32)."""
    x = torch.randint(WORDS, (BATCH, 4), generator=generator).repeat(1, 4)
    masked = torch.rand(x.shape, generator=generator) < 0.25
    return x.masked_fill(masked, WORDS), x.masked_fill(~masked, -100)


def next_words(generator: torch.Generator) -> Batch:
    """Four words of 32, repeated, and the next word of each from the fourth on."""
    x = torch.randint(WORDS, (BATCH, 4), generator=generator).repeat(1, 5)[:, : LENGTH + 1]
    targets = x[:, 1:].clone()
    targets[:, :3] = -100
    return x[:, :-1], targets


def translations(generator: torch.Generator) -> Batch:
    """Words, and the words that a fixed permutation makes of them."""
    x = torch.randint(WORDS, (BATCH, LENGTH), generator=generator)
    return x, (5 * x + 3) % WORDS


def entropy(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100)


def entropy_of_mean(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]).mean(1), batch[1])


def entropy_causal(model: nn.Module, batch: Batch) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    return nn.functional.cross_entropy(model(batch[0], mask).flatten(0, 1), batch[1].flatten(), ignore_index=-100)


def entropy_of_translation(model: nn.Module, batch: Batch) -> Tensor:
    source, target = batch
    previous = torch.cat([torch.full_like(target[:, :1], WORDS), target[:, :-1]], 1)
    return nn.functional.cross_entropy(model(source, previous).flatten(0, 1), target.flatten())


def squares(model: nn.Module, batch: Batch) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    return nn.functional.mse_loss(model(batch[0], mask), batch[1])


def binomial_entropy() -> float:
    shares = [math.comb(LENGTH, k) / 2**LENGTH for k in range(LENGTH + 1)]
    return -sum(share * math.log(share) for share in shares)


@dataclass(frozen=True)
class Case:
    build: Callable[[bool], nn.Module]
    draw: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    plateau: float  # the loss of the best constant answer


CASES = {
    "masked": Case(lambda pre: Model(WORDS + 1, WORDS, pre, 64, 256), motifs, entropy, math.log(WORDS)),
    "counting": Case(lambda pre: Model(2, LENGTH + 1, pre), count_ones, entropy_of_mean, binomial_entropy()),
    "time series": Case(lambda pre: Model(0, 1, pre), waves, squares, 1.0),
    "18L-1L": Case(Translator, translations, entropy_of_translation, math.log(WORDS)),
    "causal": Case(CausalModel, next_words, entropy_causal, math.log(WORDS)),
}


def batches(case: Case, seed: int, count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [case.draw(generator) for _ in range(count)]


def adam(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=lr)


def train(case: Case, seed: int, rule: str, rate: float, warm_up: int, norm_first: bool = False) -> float:
    """Train a model. Returns the mean loss of the last tenth of the updates, none of whose batches was seen before."""
    torch.manual_seed(seed)
    model, data = case.build(norm_first), batches(case, seed, UPDATES)
    if rule:
        first = model_arguments(case, model, data[0])
        admin.attach(model, first, omega=rule if rule in ("log", "constant") else "constant")
        if rule == "reference":
            admin.profile(model, first, rule="reference")
    optimizer = adam(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: min(1, (update + 1) / max(1, warm_up)))
    losses = []
    for batch in data:
        optimizer.zero_grad()
        value = case.loss(model, batch)
        value.backward()
        optimizer.step()
        schedule.step()
        losses.append(value.item())
    return mean(losses[-UPDATES // 10 :])


def model_arguments(case: Case, model: nn.Module, batch: Batch) -> tuple:
    """What the loss of a batch gives to the model."""
    calls: list[tuple] = []
    handle = model.register_forward_pre_hook(lambda _, args: calls.append(args))
    case.loss(model, batch)
    handle.remove()
    return calls[0]


def run(name: str, method: str, seed: int, rows: list[dict[str, str]]) -> dict[str, Any]:
    case = CASES[name]
    row: dict[str, Any] = {"case": name, "method": method, "seed": seed, "rate": RATE, "warm_up": 0, "rule": ""}
    began = time.monotonic()
    if method == "diagnose":
        torch.manual_seed(seed)
        model, data = case.build(False), batches(case, seed, 200)
        rates = [RATE, RATE / 3]
        result = admin.diagnose(model, data, loss=case.loss, optimizer=adam, rates=rates, steps=20000)
        print(result)
        best = next((trial for trial in result.trials if trial.status == "learns"), None)
        row |= {"advice": result.advice, "plateau": f"{result.plateau:.4f}"}
        if best:
            row |= {"rule": best.rule or "", "rate": best.rate, "warm_up": best.warm_up, "loss": f"{best.loss:.4f}"}
    else:
        if method == "advice":
            of_seed = str(seed - len(SEEDS))
            (advice,) = [r for r in rows if (r["case"], r["method"], r["seed"]) == (name, "diagnose", of_seed)]
            row |= {key: advice[key] for key in ("rule", "rate", "warm_up")}
        elif method in ("reference", "log", "constant"):
            row["rule"] = method
        value = train(case, seed, row["rule"], float(row["rate"]), int(row["warm_up"]), method == "pre-ln")
        row |= {"loss": f"{value:.4f}", "plateau": f"{case.plateau:.4f}"}
    return {**row, "seconds": round(time.monotonic() - began)}


def load(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def run_all(path: Path) -> None:
    """Make every run that has no row. The advice of seeds 1, 2 and 3 is tried with seeds 4, 5 and 6."""
    if not path.exists():
        path.write_text(",".join(FIELDS) + "\n")
    command = ["git", "-C", str(DOCS), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    plan = [(name, method, seed) for seed in SEEDS for name in CASES for method in [*METHODS, "diagnose"]]
    plan += [(name, "advice", seed + len(SEEDS)) for seed in SEEDS for name in CASES]
    for name, method, seed in plan:
        rows = load(path)
        if (name, method, str(seed)) in {(row["case"], row["method"], row["seed"]) for row in rows}:
            continue
        row = {**run(name, method, seed, rows), "commit": commit}
        with path.open("a", newline="") as file:
            csv.DictWriter(file, FIELDS, lineterminator="\n").writerow(row)
        print(name, method, seed, row.get("loss", ""), flush=True)


def table(rows: list[dict[str, str]]) -> str:
    """Losses of each seed by case and method, in bold if all of them learn; then each advice, with cases and seeds."""
    methods = [*METHODS, "advice"]
    lines = ["| case (plateau) | " + " | ".join(methods) + " |", "|---" * (len(methods) + 1) + "|"]
    for name, case in CASES.items():
        cells = []
        for method in methods:
            values = [float(row["loss"]) for row in rows if (row["case"], row["method"]) == (name, method)]
            text = ", ".join(f"{value:.2f}" for value in values)
            cells.append(f"**{text}**" if values and max(values) <= LEARNS * case.plateau else text)
        lines.append(f"| {name} ({case.plateau:.2f}) | {' | '.join(cells)} |")
    seeds: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        if row["method"] == "diagnose":
            seeds.setdefault(row["advice"], {}).setdefault(row["case"], []).append(row["seed"])
    lines.append("")
    for advice, cases in seeds.items():
        runs = "; ".join(f"{name}, seed {', '.join(of_case)}" for name, of_case in cases.items())
        lines.append(f"- {advice} ({runs})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("--csv", type=Path, default=DOCS / "rows/cases.csv")
    args = parser.parse_args()
    if args.command == "run":
        run_all(args.csv)
    else:
        print(table(load(args.csv)))


if __name__ == "__main__":
    main()
