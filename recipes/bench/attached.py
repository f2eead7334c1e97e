"""What Admin costs a BERT that it is attached to: a training step next to the stock model's.

One CPU thread, process CPU time, the two in turns; each turn gives one ratio, and the median counts.

    python recipes/bench/attached.py                                  # 12 layers of width 256, a few minutes
    python recipes/bench/attached.py --layers 6 --width 128 --pairs 5 --csv attached.csv
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
import transformers  # noqa: E402
from torch import nn  # noqa: E402

import fairseq_admin.pytorch as admin  # noqa: E402
from recipes.bench.arguments import number, output  # noqa: E402
from recipes.bench.conditions import conditions, keep  # noqa: E402
from recipes.bench.turns import interleaved, ratio  # noqa: E402

WORDS = 1000
SENTENCES, LENGTH = 4, 128


class Step:
    """A model's training step: forward, backward, Adam."""

    def __init__(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
        self.model = model
        self.batch = batch
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.model(**self.batch).loss.backward()
        self.optimizer.step()


def main(arguments: list[str] | None = None) -> int:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--layers", type=number, default=12, help="of the BERT (default: 12)")
    top.add_argument("--width", type=number, default=256, help="likewise; a multiple of 64 (default: 256)")
    top.add_argument("--pairs", type=number, default=15, help="turns (default: 15)")
    top.add_argument("--csv", type=output, help="file to write the row to")
    args = top.parse_args(arguments)
    args.device, args.clock = "cpu", "cpu"
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
    steps: list[Callable[[], object]] = [Step(stock, batch), Step(attached, batch)]
    plain, scaled = interleaved(steps, args.pairs, time.process_time, torch.device("cpu"))
    middle, low, high = ratio(scaled, plain)
    row = {
        "layers": args.layers,
        "width": args.width,
        "stock_ms": 1000 * statistics.median(plain),
        "ratio": middle,
        "low": low,
        "high": high,
    }
    print("  ".join(f"{key} {value:.4g}" for key, value in row.items()))
    keep(args.csv, conditions(args), [row])
    return 0


if __name__ == "__main__":
    sys.exit(main())
