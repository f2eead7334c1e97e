"""One table of what a step costs: stock Post-LN and Pre-LN, Admin plain, Admin fast (`--admin-fast`).

Steps (forward, loss, backward, optimizer) of the four run in turns; a turn gives one ratio to stock Post-LN, and the
median counts. Next to the time: what counting.py counts, the peak of a process that makes three steps, how much of it
came after the libraries were loaded, and the profiling pass as a share of stock's step.

    python -m recipes.bench.speed                                      # 18L-18L at widths 16, 256 and 512
    python -m recipes.bench.speed --sizes 6:512:1024 60-12:512:1024    # layers, width, target tokens
    QUICK=1 python -m recipes.bench.speed --csv speed.csv              # two minutes
"""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch

from recipes.bench import memory
from recipes.bench.arguments import FORM, parser, size
from recipes.bench.conditions import conditions, keep, start_up
from recipes.bench.step import METHODS, Run
from recipes.bench.turns import interleaved, ratio

SIZES = ["18:16:512", "18:256:1024", "18:512:1024"]
QUICK = ["6:16:512", "6:256:512", "6:256:1024"]
"""Layers, width and target tokens. Heads have 64 channels; at width 16, where only dispatch counts, 8."""
COLUMNS = """layers:6d decoder_layers:14d width:5d tokens:6d method:11s step_ms:9.1f ratio:6.3f ratio_low:9.3f
ratio_high:10.3f tokens_per_s:12.0f operations:10d waits:5d kept_mib:8.1f peak_mib:8.0f model_mib:9.0f
optimizer_ms:12.1f loss_ms:7.1f profile_forwards:16.2f profile_steps:13.2f"""
"""What is printed, and how; --csv has more."""


def peak_of(method: str, args: Namespace) -> dict[str, float]:
    """MiB at most, and above the libraries, of a process that makes three steps, and no other."""
    libraries = memory.resident()
    torch.set_num_threads(1)
    run = Run(method, args)
    for _ in range(3):
        run.step()
    return {"peak_mib": memory.peak(), "model_mib": memory.peak() - libraries}


def rows_of(args: Namespace) -> list[dict[str, Any]]:
    """A row for each method at one size."""
    runs = [Run(method, args) for method in METHODS]
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    steps = interleaved([run.step for run in runs], args.pairs, clock)
    for run in runs:
        run.forward_backward()  # gradients for the optimizer
    rules = interleaved([run.rule.step for run in runs], args.pairs, clock)
    losses = interleaved([run.loss_alone for run in runs], args.pairs, clock)
    forwards, profiles = interleaved([runs[0].forward, runs[-1].profile], args.pairs, clock)
    profiling = {
        "profile_ms": 1000 * median(profiles),
        "profile_forwards": median(ours / stock for stock, ours in zip(forwards, profiles)),
        "profile_steps": median(profiles) / median(steps[0]),
    }
    result = []
    for method, run, times, rule, loss in zip(METHODS, runs, steps, rules, losses):
        row: dict[str, Any] = {"method": method}
        row |= {name: getattr(args, name) for name in ("layers", "decoder_layers", "width", "tokens")}
        row |= {"dtype": "float32", "step_ms": 1000 * median(times)}
        row["ratio"], row["ratio_low"], row["ratio_high"] = ratio(times, steps[0])
        row |= {"tokens_per_s": args.tokens / median(times)}
        row |= {"optimizer_ms": 1000 * median(rule), "loss_ms": 1000 * median(loss), **run.counts()}
        result.append(row | (profiling if run.fast else dict.fromkeys(profiling)))
    del runs, run
    os.environ.update(memory.BLOCKS_OF_THEIR_OWN)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        return [row | pool.submit(peak_of, method, args).result() for method, row in zip(METHODS, result)]


def main(arguments: list[str] | None = None) -> int:
    top = parser(__doc__)
    top.add_argument("--sizes", nargs="+", type=size, help=f"{FORM} (default: {' '.join(SIZES)})")
    top.add_argument("--words", type=int, default=4000, help="size of the vocabulary")
    top.add_argument("--length", type=int, default=32, help="tokens of a sentence")
    top.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    top.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: for a busy machine; use one thread")
    args = top.parse_args(arguments)
    if quick := os.environ.get("QUICK", "0") not in ("", "0"):
        args.pairs = 3
    if args.threads:
        torch.set_num_threads(args.threads)
    where = conditions(args.clock) | start_up(min(3, args.pairs))
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    forms = dict(column.split(":") for column in COLUMNS.split())
    widths = {name: int(form[:-1].partition(".")[0]) for name, form in forms.items()}
    print(" ".join(f"{name:>{width}}" for name, width in widths.items()), flush=True)
    rows: list[dict[str, Any]] = []
    for sizes in args.sizes or map(size, QUICK if quick else SIZES):
        measured = rows_of(Namespace(**vars(args) | sizes))
        for row in measured:  # a dash where a method has no such number
            cells = [f"{'-':>{widths[name]}}" if row[name] is None else f"{row[name]:>{forms[name]}}" for name in forms]
            print(" ".join(cells), flush=True)
        rows += measured
    keep(args.csv, where, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
