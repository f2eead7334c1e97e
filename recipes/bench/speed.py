"""One table of what a step costs: stock Post-LN and Pre-LN, Admin plain, Admin fast (`--admin-fast`).

Steps (forward, loss, backward, optimizer) of the four run in turns, on one CPU thread, in process CPU time; a turn
gives one ratio to stock Post-LN, and the median counts. Next to the time: what counting.py counts, the peak of a
process that makes three steps, and the profiling pass as a share of stock's step.

    python -m recipes.bench.speed                                      # 18L-18L at widths 16, 256 and 512
    python -m recipes.bench.speed --sizes 6:512:1024 60-12:512:1024    # layers, width, target tokens
"""

from __future__ import annotations

import os
import re
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch

from recipes.bench.common import FORM, interleaved, parser, report, size, timed
from recipes.bench.step import METHODS, Run
from recipes.compare.rows import Row

SIZES = ["18:16:512", "18:256:1024", "18:512:1024"]
"""Layers, width and target tokens. At width 16 only dispatch counts."""
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
    peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(peak[1]) / 2**10 if peak else float("nan")


def rows_of(args: Namespace) -> list[Row]:
    """A row for each method at one size."""
    runs = [Run(method, args) for method in METHODS]
    steps = interleaved([run.step for run in runs], args.pairs)
    (profiles,) = interleaved([runs[-1].profile], args.pairs)
    rows = []
    for method, run, times in zip(METHODS, runs, steps):
        row = {name: getattr(args, name) for name in ("layers", "decoder_layers", "width", "tokens")}
        row |= {"method": method, **timed(times, steps[0], "step", "ratio"), **run.counts()}
        rows.append(row | {"profile_steps": median(profiles) / median(steps[0]) if run.fast else None})
    del runs, run
    os.environ.update(BLOCKS_OF_THEIR_OWN)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        return [row | {"peak_mib": pool.submit(peak_of, row["method"], args).result()} for row in rows]


def main() -> None:
    top = parser(__doc__)
    top.add_argument("--sizes", nargs="+", type=size, help=f"{FORM} (default: {' '.join(SIZES)})")
    args = top.parse_args()
    sizes = args.sizes or map(size, SIZES)
    report((rows_of(Namespace(**vars(args) | each, words=4000, length=32)) for each in sizes), args.csv)


if __name__ == "__main__":
    main()
