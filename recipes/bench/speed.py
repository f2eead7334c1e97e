"""One table of what a step costs: stock Post-LN and Pre-LN, Admin plain, Admin fast (`--admin-fast`).

Steps (forward, loss, backward, optimizer) of the four run in turns; a turn gives one ratio to stock Post-LN, and the
median counts. Stock has fairseq's loss and Adam, Admin plain fairseq's loss and torch's RAdam, and Admin fast has its
own of both. Next to the time: what counting.py counts, the peak of a process that makes three steps, how much of it
came after the libraries were loaded, and the profiling pass as a share of stock's step.

    python recipes/bench/speed.py                              # 18L-18L at widths 16, 256 and 512
    python recipes/bench/speed.py --sizes 6:512:1024 60-12:512:1024   # layers, width, target tokens
    QUICK=1 python recipes/bench/speed.py                      # two minutes
    python recipes/bench/speed.py --csv speed.csv --json speed.json    # make bench: runs/bench/speed.csv, .json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402

from recipes.bench import memory  # noqa: E402
from recipes.bench.arguments import FORM, output, size  # noqa: E402
from recipes.bench.conditions import conditions, keep, start_up  # noqa: E402
from recipes.bench.step import METHODS, Run  # noqa: E402
from recipes.bench.turns import interleaved, ratio  # noqa: E402
from recipes.steps.common import replacing  # noqa: E402

SIZES = ["18:16:512", "18:256:1024", "18:512:1024"]
QUICK = ["6:16:512", "6:256:512", "6:256:1024"]
"""Layers, width and target tokens. Heads have 64 channels; at width 16, where only dispatch counts, 8."""


def peak_of(method: str, args: Namespace) -> dict[str, float]:
    """MiB at most, and above the libraries, in a process of its own that makes three steps."""
    sizes = f"{args.layers}-{args.decoder_layers}:{args.width}:{args.tokens}"
    same = [f"--{name}={getattr(args, name)}" for name in ("words", "length", "device", "dtype")]
    command = [sys.executable, __file__, "--sizes", sizes, *same, "--threads=1", "--memory-of", method]
    environment = {**os.environ, **memory.BLOCKS_OF_THEIR_OWN}
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    return json.loads(out.splitlines()[-1])


def peak_here(args: Namespace) -> dict[str, float]:
    """What `peak_of` reads of its process."""
    libraries = memory.resident(torch.device(args.device))
    run = Run(args.memory_of, args)
    for _ in range(3):
        run.step()
    peak = memory.peak(run.device)
    return {"peak_mib": peak, "model_mib": peak - libraries}


def rows_of(args: Namespace) -> list[dict[str, Any]]:
    """A row for each method at one size."""
    runs = [Run(method, args) for method in METHODS]
    device, clock = torch.device(args.device), time.process_time if args.clock == "cpu" else time.perf_counter
    steps = interleaved([run.step for run in runs], args.pairs, clock, device)
    for run in runs:
        run.forward_backward()  # gradients for the optimizer
    rules = interleaved([run.rule.step for run in runs], args.pairs, clock, device)
    losses = interleaved([run.loss_alone for run in runs], args.pairs, clock, device)
    passes = interleaved([runs[0].forward, runs[-1].profile], args.pairs, clock, device)
    profiling = {
        "profile_ms": 1000 * statistics.median(passes[1]),
        "profile_forwards": statistics.median(ours / stock for stock, ours in zip(*passes)),
        "profile_steps": statistics.median(passes[1]) / statistics.median(steps[0]),
    }
    result = []
    for method, run, times, rule, loss in zip(METHODS, runs, steps, rules, losses):
        middle, low, high = ratio(times, steps[0])
        result.append(
            {
                "method": method,
                "layers": args.layers,
                "decoder_layers": args.decoder_layers,
                "width": args.width,
                "tokens": args.tokens,
                "dtype": args.dtype,
                "step_ms": 1000 * statistics.median(times),
                "ratio": middle,
                "ratio_low": low,
                "ratio_high": high,
                "tokens_per_s": args.tokens / statistics.median(times),
                "optimizer_ms": 1000 * statistics.median(rule),
                "loss_ms": 1000 * statistics.median(loss),
                **run.counts(),
                **(profiling if run.fast else dict.fromkeys(profiling)),
            }
        )
    del runs, run
    return [{**row, **peak_of(row["method"], args)} for row in result]


COLUMNS = {
    "layers": (6, "d"),
    "decoder_layers": (14, "d"),
    "width": (5, "d"),
    "tokens": (6, "d"),
    "method": (11, "s"),
    "step_ms": (9, ".1f"),
    "ratio": (6, ".3f"),
    "ratio_low": (9, ".3f"),
    "ratio_high": (10, ".3f"),
    "tokens_per_s": (12, ".0f"),
    "operations": (10, "d"),
    "waits": (5, "d"),
    "kept_mib": (8, ".1f"),
    "peak_mib": (8, ".0f"),
    "model_mib": (9, ".0f"),
    "optimizer_ms": (12, ".1f"),
    "loss_ms": (7, ".1f"),
    "profile_forwards": (16, ".2f"),
    "profile_steps": (13, ".2f"),
}
"""What is printed, its width and form; --csv and --json have more."""


def line(row: dict[str, Any]) -> str:
    """A row of the table; a dash where a method has no such number."""
    cells = ((row[name], size, form) for name, (size, form) in COLUMNS.items())
    return " ".join(f"{'-':>{size}}" if value is None else f"{value:>{size}{form}}" for value, size, form in cells)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--sizes", nargs="+", type=size, help=f"{FORM} (default: {' '.join(SIZES)})")
    top.add_argument("--words", type=int, default=4000, help="size of the vocabulary")
    top.add_argument("--length", type=int, default=32, help="tokens of a sentence")
    top.add_argument("--device", default="cpu")
    top.add_argument(
        "--dtype", choices=["float32", "float16", "bfloat16"], default="float32", help="else with autocast"
    )
    top.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    top.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: CPU time, for a busy machine; use one thread"
    )
    top.add_argument("--pairs", type=int, default=15, help="turns")
    top.add_argument("--memory-of", choices=list(METHODS), help=argparse.SUPPRESS)
    top.add_argument("--csv", type=output)
    top.add_argument("--json", type=output)
    return top


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    quick = os.environ.get("QUICK", "0") not in ("", "0")
    if quick:
        args.pairs = 3
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.memory_of:
        print(json.dumps(peak_here(Namespace(**{**vars(args), **args.sizes[0]}))))
        return 0
    where = {**conditions(args), **start_up(min(3, args.pairs))}
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    print(" ".join(f"{name:>{size}}" for name, (size, _) in COLUMNS.items()), flush=True)
    rows: list[dict[str, Any]] = []
    for sizes in args.sizes or map(size, QUICK if quick else SIZES):
        measured = rows_of(Namespace(**{**vars(args), **sizes}))
        for row in measured:
            print(line(row), flush=True)
        rows += measured
    keep(args.csv, where, rows)
    if args.json:
        with replacing(args.json) as part:
            part.write_text(json.dumps({"conditions": where, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
