"""Time and memory of real training steps: fairseq's trainer, stock Post-LN next to Admin, plain and fast.

All train on the same batches in turns; the first round warms up over every shape of batch, the second is timed. A batch
gives one ratio to stock, and the median counts. Memory is torch's counter, of a step above what all the models hold.
18L-18L, width 512.

    python -m recipes.gpu_trial.times --tokens 4096 16384 --fp16 --fp16-no-flatten-grads    # fairseq's options
    python -m recipes.gpu_trial.times --tokens 4096 --compile --amp                         # also by torch.compile
"""

from __future__ import annotations

import argparse
import itertools
import logging
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from fairseq import options, tasks
from fairseq.data import Dictionary
from fairseq.data.language_pair_dataset import collate
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.trainer import Trainer
from torch._dynamo.utils import counters

from recipes.bench.turns import seconds

METHODS = {
    "stock": "--arch transformer --criterion label_smoothed_cross_entropy --optimizer adam",
    "plain": "--arch transformer_admin --admin-fast off --criterion label_smoothed_cross_entropy --optimizer radam",
    "fast": "--arch transformer_admin --admin-fast on --criterion label_smoothed_cross_entropy_fast --optimizer radam",
}
METHODS["plain compiled"] = METHODS["plain"] + " --admin-init log"  # to compile a profiling pass, too, takes minutes
"""fairseq's options; "stock", fairseq's own Post-LN, is what the others are compared with."""
COMMON = """--encoder-layers 18 --decoder-layers 18 --share-all-embeddings --clip-norm 1.0 --label-smoothing 0.1
--dropout 0.1 --attention-dropout 0.1 --activation-dropout 0.1 --lr 1e-5 --lr-scheduler fixed --log-interval 100000
--seed 1 --distributed-world-size 1"""


def batches(words: Dictionary, tokens: int, number: int) -> list[dict[str, Any]]:
    """Batches of random words, of at most so many tokens, each of sentences of about one length, as fairseq's are."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for longest in torch.linspace(12, 100, number).int().tolist():
        sentences = []
        for i, lengths in enumerate(torch.randint(longest - 4, longest + 1, (tokens // longest, 2)).tolist()):
            source, target = (torch.randint(4, len(words), (length,), generator=generator) for length in lengths)
            sentences.append({"id": i, "source": source, "target": target})
        made.append(collate(sentences, words.pad(), words.eos(), pad_to_multiple=8))
    return made


def trainer(folder: str, method: str, tokens: int, further: list[str]) -> Trainer:
    """fairseq's, of a new model, with further options."""
    text = f"{folder} -s a -t b --user-dir fairseq_admin {METHODS[method]} {COMMON} --max-tokens {tokens}"
    parsed = options.parse_args_and_arch(options.get_training_parser(), text.split() + further)
    parsed.tpu = False  # which fairseq takes --bf16 for
    cfg = convert_namespace_to_omegaconf(parsed)
    task = tasks.setup_task(cfg.task)
    model = task.build_model(cfg.model)
    if "compiled" in method:
        for layer in [*model.encoder.layers, *model.decoder.layers]:
            layer.compile(dynamic=True)
    return Trainer(cfg, task, model, task.build_criterion(cfg.criterion))


def attention(made: Trainer, batch: dict[str, Any]) -> str:
    """The kernels that computed attention in one step."""
    with torch.profiler.profile() as profile:
        made.train_step([batch])
    names = " ".join(event.key for event in profile.key_averages())
    kernels = set(re.findall(r"aten::_scaled_dot_product_(\w+)_attention(?!\w*backward)", names))
    return " and ".join(sorted(kernels)) or "bmm"


def timed(made: Trainer, batch: dict[str, Any], device: torch.device) -> tuple[float, float]:
    """Seconds of one step with one batch, and GiB at its peak above those before it (0 on a CPU)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    taken = seconds(lambda: made.train_step([batch]), device, time.perf_counter)
    return taken, (torch.cuda.max_memory_allocated() - before) / 2**30


def measure(methods: list[str], folder: str, tokens: int, number: int, further: list[str]) -> None:
    """Print a line for each method, timed on so many batches of one size."""
    trainers = {method: trainer(folder, method, tokens, further) for method in methods}
    made = batches(trainers["stock"].task.source_dictionary, tokens, number)
    for _ in range(
        2 if "plain compiled" in methods else 1
    ):  # in the first update omega is logged, which other graphs are for
        counters.clear()
        for batch, each in itertools.product(made, trainers.values()):
            each.train_step([batch])
    device = trainers["stock"].device
    taken = [{method: timed(each, batch, device) for method, each in trainers.items()} for batch in made]
    for method, each in trainers.items():
        ratios = sorted(turn[method][0] / turn["stock"][0] for turn in taken)
        row: dict[str, Any] = {"tokens": tokens, "method": method}
        row["ms"] = f"{1000 * statistics.median(turn[method][0] for turn in taken):.1f}"
        row["ratio"] = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        row["step GiB"] = f"{max(turn[method][1] for turn in taken):.2f}"
        row["updates"] = each.get_num_updates()  # fewer than steps where fp16 overflowed
        row["attention"] = attention(each, made[-1])
        if "compiled" in method:
            row["graph breaks"] = sum(counters["graph_break"].values())
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", required=True, help="of a batch, at most")
    parser.add_argument("--batches", type=int, default=24, help="of each size")
    parser.add_argument("--words", type=int, default=32000, help="of the dictionary")
    parser.add_argument("--compile", action="store_true", help="also Admin plain, each layer by torch.compile")
    args, further = parser.parse_known_args()
    methods = [method for method in METHODS if args.compile or "compiled" not in method]
    logging.disable(logging.DEBUG)  # torch.compile's
    with tempfile.TemporaryDirectory() as folder:
        for language in "ab":
            Path(folder, f"dict.{language}.txt").write_text("".join(f"w{number} 1\n" for number in range(args.words)))
        for tokens in args.tokens:
            measure(methods, folder, tokens, args.batches, further)


if __name__ == "__main__":
    main()
