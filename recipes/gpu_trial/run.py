"""`make gpu-trial`: what only a GPU can show, as a list of commands and one report, OUT/report.md.

    python -m recipes.gpu_trial.run runs/gpu-trial --device cuda --data TEXT --pair de-en --minutes 30

The most informative command is first, and the report is written again after each, so the trial may be stopped anywhere.
Started again, it runs the commands that have not ended well. All but the trainings on a text end within LIMIT.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from recipes.steps.results import commit, hardware

LIMIT = 480.0
"""Seconds, for the commands without a text together."""
RATES = {"admin": 3e-4, "pre-ln": 3e-4, "post-ln": 1e-4}
"""Each method's own: the best of `make compare` with 18 layers on real text (docs/compare.csv)."""
A_DAY = 86400.0
TESTS = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:warnings"]


def commands(device: str) -> dict[str, list[str]]:
    """The tests and the times, by name."""
    times = {
        "fp16": "--tokens 16384 4096 --fp16 --fp16-no-flatten-grads",
        "bf16": "--tokens 16384 4096 --bf16 --fp16-no-flatten-grads",
        "amp": "--tokens 8192 --amp",
        "fp16-8k": "--tokens 8192 --fp16 --fp16-no-flatten-grads",
        "me-fp16": "--tokens 8192 --memory-efficient-fp16",
        "compiled": "--tokens 4096 --compile --fp16 --fp16-no-flatten-grads",
    }
    if device == "cpu":
        times = {"fp32": "--tokens 256", "compiled": "--tokens 256 --compile"}
    program = [sys.executable, "-m", "recipes.gpu_trial.times", "--device", device]
    here = {"kernels": [*TESTS, "tests/test_cuda.py", *(["-m", "cuda"] if device == "cuda" else [])]}
    here |= {name: [*program, *options.split()] for name, options in times.items()}
    if device == "cuda":
        here["trainings"] = [*TESTS, "-m", "cuda", "tests", "--ignore", "tests/test_cuda.py"]
    return here


def on_text(folder: Path, args: argparse.Namespace) -> dict[str, list[str]]:
    """Admin, Pre-LN and Post-LN of 18 layers, as many updates each as fill the minutes by the times measured."""
    made = ["make", "own", f"DATA={args.data.resolve()}", f"PAIR={args.pair}", f"RUNS={folder.resolve() / 'text'}"]
    if args.device == "cuda":
        measured = [row for row in rows(folder, "fp16-8k") if row["method"] == "fast"]
        updates = max(30, round(60 * args.minutes / (measured[0]["ms"] / 1000 if measured else 0.2)))
        made += f"PRESET=gpu TOKENS=8192 WARMUP={min(4000, updates // 4)} SAVE_EVERY={updates // 10}".split()
    else:
        updates = 6
        made += "PRESET=cpu LAYERS=1 WIDTH=16 FFN=32 HEADS=2 MAX_TOKENS=256 MERGES=200 SAVE_EVERY=2 AVERAGE=2".split()
    made += [f"UPDATES={updates}"]
    return {f"text-{method}": [*made, f"METHOD={method}", f"LR={rate}"] for method, rate in RATES.items()}


def log_of(folder: Path, name: str) -> list[str]:
    """The lines of a command's log, if it was run. The last says how it ended."""
    path = folder / f"{name}.log"
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """What a command measured: its rows of JSON, the counts of its tests, or the score of its training."""
    lines = log_of(folder, name)
    found = [json.loads(line) for line in lines if line.startswith("{") and '"method"' in line]
    tests = [line.strip("= ") for line in lines if re.search(r"\d+ (passed|failed|skipped|error)", line)][-1:]
    scores = [" ".join(line.split()) for line in lines if re.match(r"(sacreBLEU|update \d+) +\d", line)]
    failed = [line for line in lines if line.startswith("FAILED")]
    return found + [{"result": line} for line in (*tests, *scores, *failed)]


def perform(words: list[str], path: Path, limit: float) -> None:
    """Run a command into its log; when its time is up, or the trial is stopped, all that it started ends."""
    began, ended = time.monotonic(), "stopped"
    with path.open("w") as log:
        environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
        process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True, env=environment)
        try:
            ended = f"status {process.wait(limit)}"
        except subprocess.TimeoutExpired:
            ended = "stopped, its time was up"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            log.seek(0, os.SEEK_END)
            log.write(f"\n{ended}, {time.monotonic() - began:.0f} s\n")


def report(folder: Path, todo: dict[str, list[str]]) -> None:
    """Write what is known so far: the commands and how they ended, and one block with all that they measured."""
    lines = ["# GPU trial", "", "Each command's whole output is next to this file.", ""]
    block = [f"{hardware()}, torch {torch.__version__}, CUDA {torch.version.cuda}, commit {commit()}"]
    for name, words in todo.items():
        ended = (log_of(folder, name) or ["not run"])[-1]
        lines.append(f"- {name}: {ended}: `{' '.join(words).replace(sys.executable, 'python')}`")
        block += [f"{name}: {ended}"]
        block += ["  " + ", ".join(f"{key} {value}" for key, value in row.items()) for row in rows(folder, name)]
    lines += [
        "",
        "Ratios are to stock Post-LN's step, batch by batch: median, lowest and highest. Memory is a step's, above",
    ]
    lines += ["the weights and the optimizer's state. To paste into an issue:", "", "```", *block, "```", ""]
    (folder / "report.md").write_text("\n".join(lines), encoding="utf-8")


def run_missing(folder: Path, todo: dict[str, list[str]], known: dict[str, list[str]], limit: float) -> None:
    """Run the commands that have not ended well, until the limit; report on these and those known."""
    end = time.monotonic() + limit
    for name, words in todo.items():
        if not any("status 0," in line for line in log_of(folder, name)[-1:]) and time.monotonic() < end:
            print(f"{name}: {' '.join(words)}", flush=True)
            perform(words, folder / f"{name}.log", end - time.monotonic())
        report(folder, known | todo)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--data", type=Path, help="folder with train, valid and test, as for `make own`")
    parser.add_argument("--pair", default="de-en", help="its languages")
    parser.add_argument("--minutes", type=float, default=30, help="to train each method on it")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no GPU that torch can use; DEVICE=cpu tries the trial itself")
    if not 0 < args.minutes <= 10000:
        parser.error(f"MINUTES={args.minutes:g} is not a time to train; expected more than 0, at most 10000")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args.folder.mkdir(parents=True, exist_ok=True)
    known = commands(args.device)
    run_missing(args.folder, known, {}, LIMIT if args.device == "cuda" else A_DAY)
    if args.data:
        run_missing(args.folder, on_text(args.folder, args), known, A_DAY * args.minutes)
    print(f"report: {args.folder / 'report.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
