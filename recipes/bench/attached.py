"""What Admin costs a BERT that it is attached to: a training step next to the stock model's.

One CPU thread, process CPU time, the two in turns; each turn gives one ratio, and the median counts.

    python -m recipes.bench.attached                                  # 12 layers of width 256, a few minutes
    python -m recipes.bench.attached --layers 6 --width 128 --pairs 5 --csv attached.csv
"""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

import fairseq_admin.pytorch as admin
from recipes.bench.arguments import parser
from recipes.bench.conditions import conditions, keep
from recipes.bench.turns import interleaved, ratio

WORDS, SENTENCES, LENGTH = 1000, 4, 128


def step_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> Callable[[], None]:
    """A model's training step: forward, backward, Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)

    def step() -> None:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    return step


def main(arguments: list[str] | None = None) -> int:
    top = parser(__doc__)
    top.add_argument("--layers", type=int, default=12, help="of the BERT (default: 12)")
    top.add_argument("--width", type=int, default=256, help="likewise; a multiple of 64 (default: 256)")
    args = top.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=args.width,
        intermediate_size=4 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 64,
    )
    stock = transformers.BertForMaskedLM(config)
    words = torch.randint(WORDS, (SENTENCES, LENGTH))
    batch: dict[str, Any] = {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}
    attached = admin.attach(copy.deepcopy(stock), **batch)
    plain, scaled = interleaved([step_of(stock, batch), step_of(attached, batch)], args.pairs)
    row = {"layers": args.layers, "width": args.width, "stock_ms": 1000 * statistics.median(plain)}
    row["ratio"], row["low"], row["high"] = ratio(scaled, plain)
    print("  ".join(f"{key} {value:.4g}" for key, value in row.items()))
    keep(args.csv, conditions(), [row])
    return 0


if __name__ == "__main__":
    sys.exit(main())
