"""A deep Post-LN language model of torch.nn: stock, as Pre-LN, and with Admin, from the same initial weights.

    OMP_NUM_THREADS=1 python docs/examples/nn_transformer.py

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
RATE, WARM_UP = 1e-3, 50
METHODS = ["post-ln", "pre-ln", "admin"]


class LanguageModel(nn.Module):  # nothing in it knows of Admin
    def __init__(self, layers: int, norm_first: bool) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=norm_first)
        norm = nn.LayerNorm(WIDTH) if norm_first else None
        self.encoder = nn.TransformerEncoder(layer, layers, norm, enable_nested_tensor=False)
        for weight in self.encoder.parameters():  # it copies one layer: draw each, as nn.Transformer does
            if weight.dim() > 1:
                nn.init.xavier_uniform_(weight)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.positions.weight
        return self.out(self.encoder(x, nn.Transformer.generate_square_subsequent_mask(LENGTH), is_causal=True))


def read() -> list[Tensor]:
    """Rows of LENGTH + 1 tokens to train on and held out; a paragraph is only in one, the rarest words are token 0."""
    paragraphs = list(dict.fromkeys(re.split(r"\n\s*\n", "\n\n".join(topics.values()))))
    held_out = paragraphs[::20]
    del paragraphs[::20]
    texts = [re.findall(r"\w+|[^\w\s]", "\n".join(split)) for split in (paragraphs, held_out)]
    ids = {word: i for i, (word, _) in enumerate(Counter(texts[0]).most_common(WORDS - 1), 1)}
    return [torch.tensor([ids.get(word, 0) for word in text]).unfold(0, LENGTH + 1, LENGTH) for text in texts]


def loss(model: nn.Module, rows: Tensor) -> Tensor:
    """In nats a token; rows: batch x (LENGTH + 1)."""
    return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def run(method: str, layers: int, updates: int, seed: int) -> None:
    train, valid = read()
    torch.manual_seed(seed)
    model = LanguageModel(layers, norm_first=method == "pre-ln")
    batches = [train[torch.randint(len(train), (BATCH,))] for _ in range(updates)]
    if method == "admin":
        admin.attach(model, batches[0][:, :-1])  # before the optimizer is made
        admin.profile(model, batches[0][:, :-1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: min(1, (update + 1) / WARM_UP))
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        bits, before = loss(model, valid).item() / math.log(2), model(valid[:, :-1])
        print(f"{method}, seed {seed}: {bits:.2f} bits a word", flush=True)
        if method == "admin":
            admin.fold(model, valid[:BATCH, :-1])  # the stock model again
            print(f"folded: outputs differ by {(model(valid[:, :-1]) - before).abs().max():.1e} at most", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--method", nargs="+", choices=METHODS, default=METHODS)
    args = parser.parse_args()
    for method in args.method:
        run(method, args.layers, args.updates, args.seed)
