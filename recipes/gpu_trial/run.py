"""`make gpu-trial`: what only a GPU can show, as a list of commands and one report, OUT/report.md.

    python -m recipes.gpu_trial.run runs/gpu-trial --device cuda --data TEXT --pair de-en --minutes 30

The report is written again after each command, so the trial may be stopped anywhere. Started again, it runs the
commands that have not ended well. All but the trainings on a text end within LIMIT.
"""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from recipes.steps.results import commit, hardware

LIMIT = {"cuda": 480.0, "cpu": 86400.0}
"""Seconds, for the commands without a text together."""
TESTS, TIMES = "python -m pytest -p no:cacheprovider -p no:warnings", "python -m recipes.gpu_trial.times"
SMALL = "--tokens 256 --batches 2 --words 100 --cpu --encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 16"
COMMANDS = {
    "cuda": {
        "kernels": f"{TESTS} tests/test_cuda.py -m cuda",
        "fp16": f"{TIMES} --tokens 4096 16384 --fp16 --fp16-no-flatten-grads",
        "bf16": f"{TIMES} --tokens 4096 16384 --bf16 --fp16-no-flatten-grads",
        "amp": f"{TIMES} --tokens 8192 --amp",
        "fp16-8k": f"{TIMES} --tokens 8192 --fp16 --fp16-no-flatten-grads",
        "me-fp16": f"{TIMES} --tokens 8192 --memory-efficient-fp16",
        "compiled": f"{TIMES} --tokens 4096 --compile --fp16 --fp16-no-flatten-grads",
        "trainings": f"{TESTS} -m cuda tests --ignore tests/test_cuda.py",
    },
    "cpu": {
        "kernels": f"{TESTS} tests/test_cuda.py",
        "fp32": f"{TIMES} {SMALL}",
        "compiled": f"{TIMES} {SMALL} --compile",
    },
}
"""By device, the most informative first."""
ON_TEXT = {
    "cuda": "PRESET=gpu TOKENS=8192 UPDATES={updates} WARMUP={warmup} SAVE_EVERY={every}",
    "cpu": "PRESET=cpu LAYERS=1 WIDTH=16 FFN=32 HEADS=2 MAX_TOKENS=256 MERGES=200 SAVE_EVERY=2 AVERAGE=2 UPDATES=6",
}
RATES = {"admin": 3e-4, "pre-ln": 3e-4, "post-ln": 1e-4}
"""Each method's own: the best of `make compare` with 18 layers on real text (docs/compare.csv)."""
RESULT = re.compile(r"tokens \d+, method|=* ?\d+ (passed|failed|skipped|error)|FAILED|sacreBLEU +\d|update \d+ +\d")
"""How a line begins that the report repeats: a time, a count of tests, a test that failed, a score, a validation."""

REPORT = """# GPU trial

Each command's whole output is next to this file. Ratios are to stock Post-LN's step, batch by batch: median, lowest and
highest. Memory is a step's, above the weights and the optimizer's state. To paste into an issue:

```
{}
```
"""


def on_text(folder: Path, args: argparse.Namespace) -> dict[str, str]:
    """Three methods with 18 layers, as many updates each as fill the minutes by the times measured."""
    measured = re.search("8192, method fast, ms ([0-9.]+)", "\n".join(log_of(folder, "fp16-8k")))
    updates = max(30, round(60000 * args.minutes / (float(measured[1]) if measured else 200)))
    settings = ON_TEXT[args.device].format(updates=updates, warmup=min(4000, updates // 4), every=updates // 10)
    data, runs = (shlex.quote(str(path.resolve())) for path in (args.data, folder / "text"))
    command = f"make own DATA={data} PAIR={args.pair} RUNS={runs} {settings}"
    return {f"text-{method}": f"{command} METHOD={method} LR={rate}" for method, rate in RATES.items()}


def log_of(folder: Path, name: str) -> list[str]:
    """The lines of a command's log, if it was run. The last says how it ended."""
    path = folder / f"{name}.log"
    return (path.read_text(errors="replace").splitlines() if path.exists() else []) or ["not run"]


def perform(command: str, path: Path, limit: float) -> None:
    """Run a command into its log; when its time is up, or the trial is stopped, all that it started ends."""
    began, ended = time.monotonic(), "stopped"
    words = [
        sys.executable if word == "python" else word
        for word in shlex.split(f"python -m recipes.steps.guard -- {command}")
    ]
    with path.open("w") as log:
        try:
            ended = f"status {subprocess.run(words, stdout=log, stderr=log, timeout=limit).returncode}"
        except subprocess.TimeoutExpired:
            ended = "stopped, its time was up"
        finally:
            log.write(f"\n{ended}, {time.monotonic() - began:.0f} s\n")


def report(folder: Path, commands: dict[str, str]) -> None:
    """Write what is known so far: one block with the commands, how they ended and what they measured."""
    block = [f"{hardware()}, torch {torch.__version__}, CUDA {torch.version.cuda}, commit {commit()}"]
    for name, command in commands.items():
        log = log_of(folder, name)
        block += [
            f"{name}: {log[-1]}: {command}",
            *("  " + " ".join(line.split()) for line in log if RESULT.match(line)),
        ]
    (folder / "report.md").write_text(REPORT.format("\n".join(block)), encoding="utf-8")


def run_missing(folder: Path, commands: dict[str, str], before: dict[str, str], limit: float) -> None:
    """Run the commands that have not ended well, until the limit; report on them and on those before."""
    end = time.monotonic() + limit
    for name, command in commands.items():
        if not log_of(folder, name)[-1].startswith("status 0,") and time.monotonic() < end:
            print(f"{name}: {command}", flush=True)
            perform(command, folder / f"{name}.log", end - time.monotonic())
        report(folder, before | commands)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=list(COMMANDS), default="cuda")
    parser.add_argument("--data", type=Path, help="folder with train, valid and test, as for `make own`")
    parser.add_argument("--pair", default="de-en", help="its languages")
    parser.add_argument("--minutes", type=float, default=30, help="to train each method on it")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no GPU that torch can use; DEVICE=cpu tries the trial itself")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args.folder.mkdir(parents=True, exist_ok=True)
    run_missing(args.folder, COMMANDS[args.device], {}, LIMIT[args.device])
    if args.data:
        run_missing(args.folder, on_text(args.folder, args), COMMANDS[args.device], LIMIT["cpu"] * args.minutes)
    print(f"report: {args.folder / 'report.md'}")


if __name__ == "__main__":
    main()
