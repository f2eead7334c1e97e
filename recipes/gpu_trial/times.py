"""Time and memory of real training steps: fairseq's trainer, stock Post-LN next to Admin, plain and fast.

All train on the same batches in turns; the first round warms up over every shape of batch, the second is timed. A batch
gives one ratio to stock, and the median counts. Memory is torch's counter, of a step above what all the models hold. A
row of JSON is printed for every method and size: 18L-18L, width 512; on a CPU, to try it, one layer.

    python -m recipes.gpu_trial.times --tokens 16384 4096 --fp16 --fp16-no-flatten-grads    # fairseq's options
    python -m recipes.gpu_trial.times --tokens 4096 --compile --amp                         # also by torch.compile
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import statistics
import sys
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

METHODS = {
    "stock": "--arch transformer --criterion label_smoothed_cross_entropy --optimizer adam",
    "plain": "--arch transformer_admin --admin-fast off --criterion label_smoothed_cross_entropy --optimizer radam",
    "fast": "--arch transformer_admin --admin-fast on --criterion label_smoothed_cross_entropy_fast --optimizer radam",
}
"""fairseq's options; "stock", fairseq's own Post-LN, is what the others are compared with."""
SIZES = {"cuda": (18, 512, 32000, 24), "cpu": (1, 16, 100, 2)}
"""Layers of either stack, width, words of the dictionary, and batches."""


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


def trainer(args: argparse.Namespace, folder: Path, method: str, tokens: int) -> Trainer:
    """fairseq's, of a new model."""
    text = f"{folder} -s a -t b --user-dir fairseq_admin {METHODS[method.split()[0]]}"
    layers, width, *_ = SIZES[args.device]
    for side in ("encoder", "decoder"):
        text += f" --{side}-layers {layers} --{side}-attention-heads {max(2, width // 64)}"
        text += f" --{side}-embed-dim {width} --{side}-ffn-embed-dim {4 * width}"
    text += " --share-all-embeddings --dropout 0.1 --attention-dropout 0.1 --activation-dropout 0.1 --clip-norm 1.0"
    text += " --label-smoothing 0.1 --lr 1e-5 --lr-scheduler fixed --seed 1 --distributed-world-size 1"
    text += f" --max-tokens {tokens} --log-interval 100000" + (" --cpu" if args.device == "cpu" else "")
    text += " --admin-init log" if method.endswith("compiled") else ""  # a profiling pass is compiled, too, for minutes
    given = options.parse_args_and_arch(options.get_training_parser(), text.split() + args.fairseq)
    given.tpu = False  # which fairseq takes --bf16 for
    cfg = convert_namespace_to_omegaconf(given)
    task = tasks.setup_task(cfg.task)
    model = task.build_model(cfg.model)
    if method.endswith("compiled"):
        for layer in [*model.encoder.layers, *model.decoder.layers]:
            layer.compile(dynamic=True)
    return Trainer(cfg, task, model, task.build_criterion(cfg.criterion))


def attention(made: Trainer, batch: dict[str, Any]) -> str:
    """The kernels that computed attention in one step."""
    with torch.profiler.profile() as profile:
        made.train_step([batch])
    kernels = {
        re.match("aten::_scaled_dot_product_(?!.*backward)(.*)_attention", it.key) for it in profile.key_averages()
    }
    return ", ".join(sorted(kernel[1] for kernel in kernels if kernel)) or "bmm"


def timed(made: Trainer, batch: dict[str, Any], cuda: bool) -> tuple[float, float]:
    """Seconds of one step with one batch, and GiB at its peak above those before it (0 on a CPU)."""
    wait = torch.cuda.synchronize if cuda else lambda: None
    wait()
    torch.cuda.reset_peak_memory_stats() if cuda else None
    before, start = torch.cuda.memory_allocated() if cuda else 0, time.perf_counter()
    made.train_step([batch])
    wait()
    return time.perf_counter() - start, (torch.cuda.max_memory_allocated() - before) / 2**30 if cuda else 0.0


def rows(args: argparse.Namespace, folder: Path, tokens: int) -> list[dict[str, Any]]:
    """A row for each method at one size."""
    methods = [*METHODS, "plain compiled"] if args.compile else list(METHODS)
    trainers = {method: trainer(args, folder, method, tokens) for method in methods}
    made = batches(trainers["stock"].task.source_dictionary, tokens, SIZES[args.device][-1])
    for _ in range(2 if args.compile else 1):  # in the first update omega is logged, which other graphs are for
        counters.clear()
        for batch in made:
            for each in trainers.values():
                each.train_step([batch])
    taken = [{method: timed(each, batch, args.device == "cuda") for method, each in trainers.items()} for batch in made]
    result = []
    for method, each in trainers.items():
        ratios = sorted(turn[method][0] / turn["stock"][0] for turn in taken)
        row = {"tokens": tokens, "method": method}
        row["ms"] = round(1000 * statistics.median(turn[method][0] for turn in taken), 1)
        row |= {"ratio": round(statistics.median(ratios), 3), "low": round(ratios[0], 3), "high": round(ratios[-1], 3)}
        row["step GiB"] = round(max(turn[method][1] for turn in taken), 2)
        row["updates"] = each.get_num_updates()  # fewer than steps where fp16 overflowed
        row["attention"] = attention(each, made[-1])
        if method.endswith("compiled"):
            row["graph breaks"] = sum(counters["graph_break"].values())
        result.append(row)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+", required=True, help="of a batch, at most")
    parser.add_argument("--compile", action="store_true", help="also Admin plain, each layer by torch.compile")
    args, rest = parser.parse_known_args()
    args.fairseq = rest
    logging.disable(logging.DEBUG)  # torch.compile's
    words = Dictionary()
    for number in range(SIZES[args.device][2]):
        words.add_symbol(f"w{number}")
    with tempfile.TemporaryDirectory() as name:
        for language in "ab":
            words.save(f"{name}/dict.{language}.txt")
        for tokens in args.tokens:
            try:
                for row in rows(args, Path(name), tokens):
                    print(json.dumps(row), flush=True)
            except torch.cuda.OutOfMemoryError as error:
                print(f"{tokens} tokens: {error}", file=sys.stderr)
                torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
