"""The cost of Admin in a BERT that it is attached to: its training step divided by that of the stock model.

Both models train in turns, on one CPU thread, in process CPU time. Each turn gives one ratio; the row has their median.

    python -m recipes.research.bench.attached                                  # 12 layers of width 768: BERT-base
    python -m recipes.research.bench.attached --layers 6 --width 128 --pairs 5 --csv attached.csv
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import fairseq_admin.pytorch as admin
from recipes.research.bench.common import interleaved, machine, timed
from recipes.steps.results import write_runs

WORDS, SENTENCES, LENGTH = 1000, 4, 128


def step_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> Callable[[], None]:
    """A model's training step: forward, backward, Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)

    def step() -> None:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    return step


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12, help="layers of the BERT (default: 12)")
    parser.add_argument("--width", type=int, default=768, help="its width, a multiple of 64 (default: 768)")
    parser.add_argument("--pairs", type=int, default=15, help="turns (default: 15)")
    parser.add_argument("--csv", type=Path, help="file to write the row to")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    sizes = {"hidden_size": args.width, "intermediate_size": 4 * args.width, "num_attention_heads": args.width // 64}
    config = transformers.BertConfig(vocab_size=WORDS, num_hidden_layers=args.layers, **sizes)
    stock = transformers.BertForMaskedLM(config)
    words = torch.randint(WORDS, (SENTENCES, LENGTH))
    batch: dict[str, Any] = {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}
    attached = admin.attach(copy.deepcopy(stock), batch)
    plain, scaled = interleaved([step_of(stock, batch), step_of(attached, batch)], args.pairs)
    row = {"layers": args.layers, "width": args.width, **timed(scaled, plain, "step"), **machine()}
    print(", ".join(f"{name} {value}" for name, value in row.items()))
    if args.csv:
        write_runs(args.csv, [row])


if __name__ == "__main__":
    main()
