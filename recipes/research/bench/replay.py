"""The share of steps that `--admin-fast graph` replays on a text, by the batches that fairseq makes. Nothing trains.

    python -m recipes.research.bench.replay --csv docs/rows/bench/replay.csv   # IWSLT'14 and Multi30k, by their lengths
    python -m recipes.research.bench.replay data-bin --max-tokens 8192         # a text of yours

A row has the number of batches that fairseq makes in an epoch, and with `--admin-fast graph` their number, their
shapes, the share of padding in their tokens, their tokens divided by those of fairseq's batches, and the share of steps
that is replayed in the first epoch and in the second. The monitor's steps are not among them; those are computed.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any
from unittest import mock

from tabulate import tabulate

from fairseq_admin.fast import graphs
from recipes.research.bench.common import machine
from recipes.research.bench.step import read_lengths, trainer
from recipes.research.rows import Row
from recipes.steps.common import run
from recipes.steps.results import write_runs


def tokens_of(samples: list[Any]) -> int:
    """Tokens of some batches on both sides, padding included."""
    return sum(sample["net_input"]["src_tokens"].numel() + sample["target"].numel() for sample in samples)


def row_of(text: str, tokens: int) -> Row:
    """The row of a text in batches of up to `tokens` tokens."""
    lengths = read_lengths(text)
    options = ("--cpu", "--max-tokens", str(tokens), "--num-workers", "0")
    plain, shaped = (trainer(method, 92, (1, 1), 16, *options, lengths=lengths) for method in ("fast", "graph"))
    expected = list(plain.get_train_iterator(1).next_epoch_itr())
    iterator, steps = shaped.get_train_iterator(1), graphs.RecordedSteps(shaped.model, [])
    replayed = []
    with mock.patch.object(graphs, "_Pair"):
        for _ in range(2):
            samples = list(iterator.next_epoch_itr())
            batches = [{**sample["net_input"], "target": sample["target"]} for sample in samples]
            replayed.append(sum(steps.pair_for(mock.Mock(), batch) is not None for batch in batches) / len(batches))
    sizes = {tuple(tensor.shape for tensor in batch.values()) for batch in batches}
    real = sum(sample["ntokens"] + int(sample["net_input"]["src_lengths"].sum()) for sample in samples)
    counts = {"text": text, "max_tokens": tokens, "stock_batches": len(expected), "batches": len(samples)}
    shares = {"padding": 1 - real / tokens_of(samples), "tokens": tokens_of(samples) / tokens_of(expected)}
    shares |= dict(zip(("first_epoch", "second_epoch"), replayed))
    return {**counts, "shapes": len(sizes), **{name: round(share, 4) for name, share in shares.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", default=["iwslt14", "multi30k"], help="folders of fairseq-preprocess")
    parser.add_argument("--max-tokens", nargs="+", type=int, default=[4096, 8192, 16384], help="default: %(default)s")
    parser.add_argument("--csv", type=Path, help="file to write the rows to")
    args = parser.parse_args()
    logging.disable(logging.INFO)
    rows = [row_of(text, tokens) for text in args.texts for tokens in args.max_tokens]
    print(tabulate(rows, headers="keys", floatfmt=".3f"))
    if args.csv:
        write_runs(args.csv, [{**row, **machine()} for row in rows])


if __name__ == "__main__":
    run(main)
