"""A deep Post-LN language model of torch.nn: stock, as Pre-LN, and with Admin, from the same initial weights.

    OMP_NUM_THREADS=1 python docs/examples/nn_transformer.py                              # three methods, one core
    python docs/examples/nn_transformer.py --method admin --rule log --rate 1e-3 5e-4 3e-4 --seed 1 2

The text is the reference that Python carries for its own help(); a word or a punctuation mark is a token.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

import fairseq_admin.pytorch as admin

WIDTH, LENGTH, BATCH, WORDS = 128, 32, 8, 2000
WARM_UP = 100
METHODS = ["post-ln", "pre-ln", "admin"]
RULES = ["constant", "log", "linear"]


class LanguageModel(nn.Module):
    """Stock layers of torch.nn; nothing in it knows of Admin."""

    def __init__(self, layers: int, norm_first: bool) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=norm_first)
        last = nn.LayerNorm(WIDTH) if norm_first else None
        self.encoder = nn.TransformerEncoder(layer, layers, last, enable_nested_tensor=False)
        for weight in self.encoder.parameters():  # its layers are copies of one: draw each, as nn.Transformer does
            if weight.dim() > 1:
                nn.init.xavier_uniform_(weight)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.words(ids) + self.positions.weight)
        return self.out(self.encoder(x, nn.Transformer.generate_square_subsequent_mask(LENGTH), is_causal=True))


def read() -> list[Tensor]:
    """Rows of LENGTH + 1 tokens to train on and held out; a paragraph is only in one, the rarest words are token 0."""
    paragraphs = list(dict.fromkeys(re.split(r"\n\s*\n", "\n\n".join(topics.values()))))
    held_out = paragraphs[::20]
    del paragraphs[::20]
    texts = [re.findall(r"\w+|[^\w\s]", "\n".join(split)) for split in (paragraphs, held_out)]
    ids = {word: i for i, (word, _) in enumerate(Counter(texts[0]).most_common(WORDS - 1), 1)}
    return [torch.tensor([ids.get(word, 0) for word in text]).unfold(0, LENGTH + 1, LENGTH) for text in texts]


def frequencies_alone(train: Tensor, valid: Tensor) -> float:
    """Bits a word of the best model that reads nothing: the plateau."""
    counts = torch.bincount(train.flatten(), minlength=WORDS) + 1.0
    return -(counts / counts.sum()).log2()[valid[:, 1:]].mean().item()


def loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Nats a word. Shape of rows: (B, LENGTH + 1)."""
    return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def run(method: str, rule: str, rate: float, seed: int, layers: int, updates: int, train: Tensor, valid: Tensor) -> str:
    """Train one model; bits a word held out and, with Admin, how far the folded model's outputs are from its."""
    torch.manual_seed(seed)
    model = LanguageModel(layers, norm_first=method == "pre-ln")
    batches = [train[torch.randint(len(train), (BATCH,))] for _ in range(updates)]
    if method == "admin":
        admin.attach(model, batches[0][:, :-1], omega=rule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: min(1, (update + 1) / WARM_UP))
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        bits = f"{loss(model, valid).item() / math.log(2):.2f}"
        if method != "admin":
            return bits
        before = model(valid[:, :-1])
        admin.fold(model, valid[:BATCH, :-1])  # the stock model again
        return f"{bits}    folded: outputs differ by {(model(valid[:, :-1]) - before).abs().max():.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--method", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--rule", choices=RULES, default="constant", help="of omega, for admin")
    parser.add_argument("--rate", nargs="+", type=float, default=[1e-3])
    parser.add_argument("--seed", nargs="+", type=int, default=[1])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--updates", type=int, default=300)
    args = parser.parse_args()
    train, valid = read()
    print(f"word frequencies alone: {frequencies_alone(train, valid):.2f} bits a word")
    print(f"{'method':8} {'rate':>7} {'seed':>4} bits a word")
    for method in args.method:
        for rate in args.rate:
            for seed in args.seed:
                bits = run(method, args.rule, rate, seed, args.layers, args.updates, train, valid)
                print(f"{method:8} {rate:7g} {seed:4} {bits:>11}", flush=True)


if __name__ == "__main__":
    main()
