"""The cost of Admin attached to a BERT: its training step is compared with the stock model's.

The two models take steps in turns on one CPU thread, and their process CPU time is measured. Each turn gives one ratio;
the median of the ratios is the result.

    python -m recipes.bench.attached                                  # 12 layers of width 256, a few minutes
    python -m recipes.bench.attached --layers 6 --width 128 --pairs 5 --csv attached.csv
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

import fairseq_admin.pytorch as admin
from recipes.bench.common import parser, report
from recipes.bench.timing import interleaved, timed
from recipes.compare.rows import Row

WORDS, SENTENCES, LENGTH = 1000, 4, 128


def step_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> Callable[[], None]:
    """A model's training step: forward, backward, Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)

    def step() -> None:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    return step


def row_of(args: Namespace) -> Row:
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
    attached = admin.attach(copy.deepcopy(stock), batch)
    plain, scaled = interleaved([step_of(stock, batch), step_of(attached, batch)], args.pairs)
    return {"layers": args.layers, "width": args.width, **timed(scaled, plain, "step")}


def main() -> None:
    top = parser(__doc__)
    top.add_argument("--layers", type=int, default=12, help="of the BERT (default: 12)")
    top.add_argument("--width", type=int, default=256, help="likewise; a multiple of 64 (default: 256)")
    args = top.parse_args()
    report(([row_of(args)] for _ in range(1)), args.csv)


if __name__ == "__main__":
    main()
