"""One table of what a step costs: stock Post-LN and Pre-LN, Admin plain, Admin fast (`--admin-fast`).

Steps (forward, loss, backward, optimizer) of the four run in turns, on one CPU thread, in process CPU time; a turn
gives one ratio to stock Post-LN, and the median counts. Next to the time: what counting.py counts, the peak of a
process that makes three steps, and the profiling pass as a share of stock's step.

    python -m recipes.bench.speed                                      # 18L-18L at widths 16, 256 and 512
    python -m recipes.bench.speed --sizes 6:512:1024 60-12:512:1024    # layers, width, target tokens
    QUICK=1 python -m recipes.bench.speed --csv speed.csv              # two minutes
"""

from __future__ import annotations

import os
import re
import sys
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tabulate import tabulate

from recipes.bench.arguments import FORM, parser, size
from recipes.bench.conditions import conditions, keep
from recipes.bench.step import METHODS, Run
from recipes.bench.turns import interleaved, ratio

SIZES = ["18:16:512", "18:256:1024", "18:512:1024"]
QUICK = ["6:16:512", "6:256:512", "6:256:1024"]
"""Layers, width and target tokens. Heads have 64 channels; at width 16, where only dispatch counts, 8."""
BLOCKS_OF_THEIR_OWN = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}
"""The environment of a process whose memory is measured: what malloc keeps for later is no one's memory."""


def peak_of(method: str, args: Namespace) -> float:
    """MiB at most of a process that makes three steps, and no other; nan where it has no /proc to tell.

    (Peaks of getrusage are not to be trusted on Linux, where a child begins with its parent's across exec.)
    """
    torch.set_num_threads(1)
    run = Run(method, args)
    for _ in range(3):
        run.step()
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) / 2**10 if found else float("nan")


def rows_of(args: Namespace) -> list[dict[str, Any]]:
    """A row for each method at one size."""
    runs = [Run(method, args) for method in METHODS]
    steps = interleaved([run.step for run in runs], args.pairs)
    (profiles,) = interleaved([runs[-1].profile], args.pairs)
    result = []
    for method, run, times in zip(METHODS, runs, steps):
        row: dict[str, Any] = {name: getattr(args, name) for name in ("layers", "decoder_layers", "width", "tokens")}
        row |= {"method": method, "step_ms": 1000 * median(times)}
        row["ratio"], row["ratio_low"], row["ratio_high"] = ratio(times, steps[0])
        result.append(row | run.counts() | {"profile_steps": median(profiles) / median(steps[0]) if run.fast else None})
    del runs, run
    os.environ.update(BLOCKS_OF_THEIR_OWN)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        return [row | {"peak_mib": pool.submit(peak_of, row["method"], args).result()} for row in result]


def main(arguments: list[str] | None = None) -> int:
    top = parser(__doc__)
    top.add_argument("--sizes", nargs="+", type=size, help=f"{FORM} (default: {' '.join(SIZES)})")
    args = top.parse_args(arguments)
    if quick := os.environ.get("QUICK", "0") not in ("", "0"):
        args.pairs = 3
    torch.set_num_threads(1)
    where = conditions()
    print(", ".join(f"{name} {value}" for name, value in where.items()), flush=True)
    rows: list[dict[str, Any]] = []
    for sizes in args.sizes or map(size, QUICK if quick else SIZES):
        measured = rows_of(Namespace(**vars(args) | sizes, words=4000, length=32))
        print(tabulate(measured, headers="keys", floatfmt=".3f"), flush=True)
        rows += measured
    keep(args.csv, where, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
