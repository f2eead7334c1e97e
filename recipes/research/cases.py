"""Public reports of models that do not train, as small models of our own: the tables of docs/cases.md, and its rows.

    OMP_NUM_THREADS=1 python -m recipes.research.cases run NAME --seed N    # diagnose, and a run that follows it
    python -m recipes.research.cases table                                  # from the rows

The models are built from what the reports say; nothing of theirs is in here. Commit 83c3ee4a has the program that made
the older rows, docs/examples/cases.py, with the five models on which `diagnose` was tuned; a row names its commit.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import fairseq_admin.pytorch as admin
from fairseq_admin.pytorch.diagnosing import Trainer
from recipes.research.omega_screen import DOCS, Row, load
from recipes.steps.results import commit, grouped

METHODS = ["stock", "reference", "log", "constant", "pre-ln"]
LEARNS = 0.9  # of the plateau's loss, at most
STEPS, UPDATES = 8000, 200
"""Steps of the run that is planned; updates of the run that follows the advice."""
LENGTH, WORDS, WIDTH = 16, 32, 64

Batch = tuple[Tensor, Tensor]


class Spectra(nn.Module):
    """RamanBench#10: a vision transformer for spectra, of 12 layers as torch copies them; the class from one token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.out = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 4)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH) * 0.02)
        self.places = nn.Parameter(torch.randn(1, LENGTH + 1, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.1, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 12, nn.LayerNorm(WIDTH), enable_nested_tensor=False)

    def forward(self, spectra: Tensor) -> Tensor:
        x = self.patches(spectra.unflatten(1, (LENGTH, 16)))
        x = torch.cat([self.token.expand(len(x), 1, WIDTH), x], 1) + self.places
        return self.out(self.layers(x)[:, 0])


class WithoutResidual(nn.TransformerEncoderLayer):
    """OpenNMT-py#2186: the feed-forward block has no shortcut."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:  # type: ignore[override]
        return self.norm2(self._ff_block(self.norm1(x + self._sa_block(x, None, None))))


class Translator(nn.Module):
    """pytorch-seq2seq#170: 6 layers on each side, learned places, Xavier weights. Or with other encoder layers."""

    def __init__(self, layer: Any = None) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS + 1, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = layer and layer(WIDTH, 4, 2 * WIDTH, 0.1, batch_first=True)
        encoder = layer and nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.body = nn.Transformer(WIDTH, 4, 6, 6, 2 * WIDTH, 0.1, custom_encoder=encoder, batch_first=True)
        self.out = nn.Linear(WIDTH, WORDS)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.xavier_uniform_(weight)

    def forward(self, source: Tensor, previous: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        source, previous = (self.words(ids) * WIDTH**0.5 + self.places.weight for ids in (source, previous))
        return self.out(self.body(source, previous, tgt_mask=mask, tgt_is_causal=True))


class Meshed(Translator):
    """meshed-memory-transformer#38: each decoder layer reads what every encoder layer writes, through gates."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(36))

    def forward(self, source: Tensor, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        memory, x = (self.words(ids) * WIDTH**0.5 + self.places.weight for ids in (source, x))
        memories = [memory := layer(memory) for layer in self.body.encoder.layers]
        for number, layer in enumerate(self.body.decoder.layers):
            x = layer.norm1(x + layer._sa_block(x, mask, None))
            read = [layer.norm2(x + layer._mha_block(x, memory, None, None)) for memory in memories]
            gated = [self.gates[6 * number + i](torch.cat([x, y], -1)).sigmoid() * y for i, y in enumerate(read)]
            x = layer.norm3((y := torch.stack(gated).sum(0) / 6**0.5) + layer._ff_block(y))
        return self.out(x)


class Series(nn.Module):
    """transformer#27: 4 layers on each side; the decoder starts from what the encoder writes; a sigmoid at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.out = nn.Linear(7, WIDTH), nn.Linear(WIDTH, 1)
        self.body = nn.Transformer(WIDTH, 4, 4, 4, 4 * WIDTH, 0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body.encoder(self.read(x))
        return self.out(self.body.decoder(x, x)).sigmoid()


PEAKS = torch.randn(4, LENGTH * 16, generator=torch.Generator().manual_seed(0))


def spectra(generator: torch.Generator) -> Batch:
    """Four spectra with as much noise as signal, and which one it is."""
    kinds = torch.randint(4, (32,), generator=generator)
    return PEAKS[kinds] + torch.randn(32, LENGTH * 16, generator=generator), kinds


def translations(generator: torch.Generator) -> Batch:
    """Words, and the words that a fixed permutation makes of them."""
    x = torch.randint(WORDS, (16, LENGTH), generator=generator)
    return x, (5 * x + 3) % WORDS


def series(generator: torch.Generator) -> Batch:
    """Seven numbers at each time, and a sum of some of them, around 9 as it was measured."""
    x = torch.randn(16, LENGTH, 7, generator=generator)
    return x, 9.5 + x[..., :1] + x[..., 1:2].cumsum(1) / 4


def translation_entropy(model: nn.Module, batch: Batch) -> Tensor:
    previous = batch[1].roll(1, 1)
    previous[:, 0] = WORDS
    return cross_entropy(model(batch[0], previous).flatten(0, 1), batch[1].flatten())


def entropy(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def squares(model: nn.Module, batch: Batch) -> Tensor:
    return mse_loss(model(batch[0]), batch[1])


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Batch], Any, float]] = {
    "spectra": (Spectra, spectra, entropy, 1e-3),
    "meshed": (Meshed, translations, translation_entropy, 5e-4),
    "6L-6L": (Translator, translations, translation_entropy, 5e-4),
    "series": (Series, series, squares, 1e-3),
    "no residuals": (partial(Translator, WithoutResidual), translations, translation_entropy, 1e-3),
}
"""Model, data, loss and rate."""


def run(name: str, seed: int) -> dict[str, Any]:
    """Diagnose a case and follow the advice, on other batches, from another seed: one row.

    If nothing learned, the case is trained as it is.
    """
    (build, draw, loss, rate), began = CASES[name], time.monotonic()

    def start(seed: int) -> tuple[nn.Module, list[Batch]]:
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        return build(), [draw(generator) for _ in range(UPDATES)]

    rates, adam = [rate, rate / 3], torch.optim.Adam
    result = admin.diagnose(*start(seed), loss=loss, optimizer=adam, rates=rates, steps=STEPS)
    print(result)
    best = next((trial for trial in result.trials if trial.status == "learns"), result.trials[0])
    trainer = Trainer(*start(seed + 3), loss, adam)
    reached = mean(trainer.train(trainer.copy(best.change), best.rate, best.warm_up, UPDATES))
    tried = "; ".join(f"{trial.change} {trial.rate:g}: {trial.loss:.3g} {trial.status}" for trial in result.trials)
    row = {"case": name, "method": "followed", "seed": seed, "rule": best.rule, "rate": best.rate, "tried": tried}
    row |= {
        "warm_up": best.warm_up,
        "loss": f"{reached:.4f}",
        "plateau": f"{result.plateau:.4f}",
        "advice": result.advice,
    }
    return {**row, "commit": commit(), "seconds": round(time.monotonic() - began)}


def table(rows: list[Row]) -> str:
    """Losses of each seed by case and method, in bold if all of them learn; then each advice, with cases and seeds."""
    rows = [row for row in rows if row["method"] != "followed"]
    methods = [*METHODS, "advice"]
    lines = ["| case (plateau) | " + " | ".join(methods) + " |", "|---" * (len(methods) + 1) + "|"]
    for (case,), runs in grouped(rows, "case").items():
        plateau, cells = next(float(row["plateau"]) for row in runs if row["method"] != "diagnose"), []
        for method in methods:
            values = [float(row["loss"]) for row in runs if row["method"] == method]
            text = ", ".join(f"{value:.2f}" for value in values)
            cells.append(f"**{text}**" if values and max(values) <= LEARNS * plateau else text)
        lines.append(f"| {case} ({plateau:.2f}) | {' | '.join(cells)} |")
    lines.append("")
    for (advice,), runs in grouped((row for row in rows if row["method"] == "diagnose"), "advice").items():
        cases = grouped(runs, "case").items()
        seeds = "; ".join(f"{case}, seed {', '.join(row['seed'] for row in same)}" for (case,), same in cases)
        lines.append(f"- {advice} ({seeds})")
    return "\n".join(lines)


def followed(rows: list[Row]) -> str:
    """The new rows: what was tried, with its rate and loss, the advice, and the loss of following it."""
    lines = ["| case, seed (plateau) | tried | advice | followed |", "|---|---|---|---|"]
    for row in rows:
        if row["method"] == "followed":
            name = f"{row['case']}, {row['seed']} ({float(row['plateau']):.2f})"
            lines.append(f"| {name} | {row['tried']} | {row['advice']} | {float(row['loss']):.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("name", nargs="?", choices=CASES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--csv", type=Path, default=DOCS / "rows/cases.csv")
    args = parser.parse_args()
    if args.command == "table":
        print(table(load(args.csv)), followed(load(args.csv)), sep="\n\n")
    else:
        row = run(args.name, args.seed)
        with args.csv.open("a", newline="") as file:
            csv.DictWriter(file, list(load(args.csv)[0]), lineterminator="\n").writerow(row)


if __name__ == "__main__":
    main()
