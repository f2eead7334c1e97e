"""Time and memory of real training steps: fairseq's trainer, stock Post-LN next to Admin, plain and fast.

All train on the same batches in turns; the first round warms up over every shape of batch, the second is timed. A batch
gives one ratio to stock, and the median counts. Memory is torch's counter, of a step above what all the models hold.

    python -m recipes.gpu_trial.times --tokens 4096 16384 --fp16    # and other options of fairseq's
"""

from __future__ import annotations

import argparse
import itertools
import logging
import re
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from fairseq.data.language_pair_dataset import collate
from fairseq.trainer import Trainer
from torch._dynamo.utils import counters

from recipes.bench.common import ratio, seconds
from recipes.bench.step import METHODS as BENCHED
from recipes.bench.step import trainer

METHODS = {"stock": BENCHED["post-ln"], "plain": BENCHED["admin-plain"], "fast": BENCHED["admin"]}
METHODS["plain compiled"] = METHODS["plain"] + " --admin-init log"  # to compile a profiling pass, too, takes minutes
"""fairseq's options; "stock", fairseq's own Post-LN, is what the others are compared with."""
DEEP = ["--encoder-layers", "18", "--decoder-layers", "18", "--activation-dropout", "0.1"]
WORDS = 32000


def batches(tokens: int) -> Iterator[dict[str, Any]]:
    """Batches of random words, of at most so many tokens, each of sentences of about one length, as fairseq's are."""
    torch.manual_seed(1)
    for longest in range(12, 108, 4):
        lengths = torch.randint(longest - 4, longest + 1, (tokens // longest, 2)).tolist()
        pairs = [[torch.randint(4, WORDS, (length,)) for length in pair] for pair in lengths]
        samples = [{"id": 0, "source": source, "target": target} for source, target in pairs]
        yield collate(samples, pad_idx=1, eos_idx=2, pad_to_multiple=8)


def looked_at(made: Trainer, batch: dict[str, Any]) -> str:
    """GiB at the peak of one step, above those before it (0 on a CPU), and the kernels that computed attention."""
    before = torch.cuda.memory_allocated()
    made.cuda_env = None  # with which fairseq, to log the peak, would reset it
    if made.cuda:
        torch.cuda.reset_peak_memory_stats()
    with torch.profiler.profile() as profile:
        made.train_step([batch])
    names = " ".join(event.key for event in profile.key_averages())
    kernels = set(re.findall(r"aten::_scaled_dot_product_(\w+)_attention(?!\w*backward)", names)) or {"bmm"}
    peak = torch.cuda.max_memory_allocated() - before
    return f"step GiB {peak / 2**30:.2f}, attention {' and '.join(sorted(kernels))}"


def measure(methods: list[str], tokens: int, further: list[str]) -> None:
    """Print a line for each method, timed on batches of one size."""
    trainers = {method: trainer(METHODS[method], WORDS, [*DEEP, *further]) for method in methods}
    if compiled := trainers.get("plain compiled"):
        for layer in [*compiled.model.encoder.layers, *compiled.model.decoder.layers]:
            layer.compile(dynamic=True)
    made = list(batches(tokens))
    for _ in range(2 if compiled else 1):  # of the first update omega is logged, by other graphs
        counters.clear()
        for batch, each in itertools.product(made, trainers.values()):
            each.train_step([batch])
    taken: dict[str, list[float]] = {method: [] for method in methods}
    for batch, (method, each) in itertools.product(made, trainers.items()):
        taken[method].append(seconds(partial(each.train_step, [batch]), each.device, time.perf_counter))
    for method, each in trainers.items():
        row = f"tokens {tokens}, method {method}, ms {1000 * statistics.median(taken[method]):.1f}, "
        row += "ratio {:.3f} ({:.3f} to {:.3f}), ".format(*ratio(taken[method], taken["stock"]))
        row += f"updates {each.get_num_updates()}, {looked_at(each, made[-1])}"  # fewer than steps: fp16 overflowed
        breaks = f", graph breaks {sum(counters['graph_break'].values())}" if "compiled" in method else ""
        print(row + breaks, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", required=True, help="of a batch, at most")
    parser.add_argument("--compile", action="store_true", help="also Admin plain, each layer by torch.compile")
    args, further = parser.parse_known_args()
    methods = [method for method in METHODS if args.compile or "compiled" not in method]
    logging.disable(logging.INFO)  # torch.compile's and fairseq's
    for tokens in args.tokens:
        measure(methods, tokens, further)


if __name__ == "__main__":
    main()
