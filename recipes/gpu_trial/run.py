"""`make gpu-trial`: what only a GPU can show, as a list of commands and one report, RUNS/gpu-trial/report.md.

    python -m recipes.gpu_trial.run DATA=TEXT PAIR=de-en MINUTES=30    # DEVICE=cpu: every step with tiny sizes

A row is in its command's log as soon as it is measured, and after each command the report and rows.csv are written
again, so the trial may be stopped anywhere. The next call skips the commands that succeeded on this card, with
this torch and at this commit. On a GPU, one call gives LIMIT seconds to all commands but the training runs on a text.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import PositiveFloat

from recipes.bench.common import machine
from recipes.compare.rows import Row, write_runs
from recipes.processes import process_group
from recipes.recipe import collect, validated
from recipes.settings import Data, Machine, Pair
from recipes.steps.common import run

PRECISIONS = {"cuda": ("fp16", "bf16"), "cpu": ("fp32",)}
PYTEST = "python -m pytest -p no:cacheprovider -p no:warnings -n logical --maxprocesses 8 -m cuda"
TESTS = {"kernels": "tests/test_cuda.py", "trainings": "tests/test_modes.py tests/test_divergence.py"}
ON_TEXT = {
    "cuda": "PRESET=gpu TOKENS=8192 UPDATES={updates} WARMUP={warmup} SAVE_EVERY={every}",
    "cpu": "PRESET=cpu LAYERS=1 WIDTH=16 FFN=32 HEADS=2 MAX_TOKENS=256 MERGES=200 SAVE_EVERY=2 AVERAGE=2 UPDATES=6",
}
RATES = {"admin": 3e-4, "pre-ln": 3e-4, "post-ln": 1e-4}
"""Each method's own: the best of `make compare` with 18 layers (docs/rows/compare.csv), Admin's with INIT=reference."""
RESULT = re.compile(r"row: |=* ?\d+ (passed|failed|skipped|error)|FAILED|sacreBLEU +\d|update \d+ +\d")
"""How a line begins that the report repeats: a row, a count of tests, a test that failed, a score, a validation."""
ABOUT = "Each command's whole output is next to this file. To paste into an issue:"


class Trial(Machine):
    DEVICE: Literal["cuda", "cpu"] = "cuda"
    """cpu tries it with tiny sizes, in a folder of its own"""
    DATA: Data | None = None
    """a folder with train, valid and test in both languages, as for make own: three models are trained on it too"""
    PAIR: Pair = "de-en"
    """source and target language of DATA"""
    MINUTES: PositiveFloat = 30
    """that each of the three may take"""
    LIMIT: PositiveFloat = 310
    """seconds that all else may take in one call"""


def commands_of(trial: Trial, folder: Path) -> Iterator[tuple[str, str]]:
    """Names and commands, the most informative first: the measurements, the tests, and the trainings on a text.

    A training run has 18 layers. Its updates would take MINUTES at the step time that was measured.
    """
    precisions = PRECISIONS[trial.DEVICE]
    names = ["ceilings"]
    names += [f"{method}-{precision}" for precision in precisions for method in ("graph", "fast", "stock-adamw")]
    names += [f"{method}-{precision}" for method in ("stock", "plain") for precision in precisions]
    names += ["bert-stock", "bert-attached", "bert-compiled"]
    yield from ((name, f"python -m recipes.gpu_trial.measure {name}") for name in names)
    yield from ((name, f"{PYTEST} {files}") for name, files in TESTS.items())
    steps = [row["ms"] for row in rows_of(log_of(folder, "fast-fp16")) if row["tokens"] == 8192]
    updates = 10 * max(3, round(6000 * trial.MINUTES / (steps[0] if steps else 200)))
    settings = ON_TEXT[trial.DEVICE].format(updates=updates, warmup=min(4000, updates // 4), every=updates // 10)
    words = f"PAIR={trial.PAIR} RUNS={shlex.quote(f'{folder}/text')}"
    for method, rate in (RATES if trial.DATA else {}).items():
        yield f"text-{method}", f"python -m recipes own {words} {settings} METHOD={method} INIT=reference LR={rate}"


def log_of(folder: Path, name: str) -> list[str]:
    """The lines of a command's log. The first names the machine and the command, the last says how the command ended.

    A command without a log has the one line `not run`.
    """
    path = folder / f"{name}.log"
    return (path.read_text(errors="replace").splitlines() if path.exists() else []) or ["not run"]


def rows_of(log: list[str]) -> list[Row]:
    """The rows that a command has printed."""
    return [json.loads(line.removeprefix("row: ")) for line in log if line.startswith("row: ")]


def perform(command: str, path: Path, limit: float, first_line: str) -> None:
    """Run a command, and write its output to its log.

    When its time is up, or the trial ends, every process that it started ends.
    """
    began = time.monotonic()
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(path.parent.absolute() / "compiled"))
    with path.open("w") as log, process_group() as group:
        print(first_line, file=log, flush=True)
        options: dict[str, Any] = {"env": environment, "timeout": limit, "process_group": group.pid}
        try:
            ended = f"status {subprocess.run(command, shell=True, stdout=log, stderr=log, **options).returncode}"
        except subprocess.TimeoutExpired:
            ended = "stopped, its time was up"
        log.write(f"\n{ended}, {time.monotonic() - began:.0f} s\n")


def run_missing(folder: Path, commands: Iterable[tuple[str, str]], limit: float) -> None:
    """Run the commands that have not succeeded. The limit is for all commands that do not train on a text.

    After each command, write the report and rows.csv. Both have only results of this machine and commit.
    """
    end = time.monotonic() + limit
    here = machine()
    block, rows = [", ".join(f"{name} {value}" for name, value in here.items())], []
    for name, command in commands:
        left = math.inf if name.startswith("text-") else end - time.monotonic()
        log, first_line = log_of(folder, name), f"{block[0]}: {command}"
        if log[0] != first_line:
            log = ["not run"]
        if not log[-1].startswith("status 0,") and left > 0:
            print(f"{name}: {command}", flush=True)
            perform(command, folder / f"{name}.log", left, first_line)
            log = log_of(folder, name)
        block.append(f"{name}: {log[-1]}: {command}")
        block += ["  " + " ".join(line.split()) for line in log if RESULT.match(line)]
        (folder / "report.md").write_text("\n".join([ABOUT, "", "```", *block, "```", ""]), encoding="utf-8")
        rows += [{**row, **here} for row in rows_of(log)]
        write_runs(folder / "rows.csv", rows)


def main() -> None:
    chosen = collect("gpu-trial", sys.argv[1:], list(Trial.model_fields))
    os.environ.update(chosen)
    trial = validated(Trial, {name: value for name, value in chosen.items() if value})
    if trial.DEVICE == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        raise ValueError("This machine has no GPU that torch can use; DEVICE=cpu tries the trial itself.")
    for name in ("MAKEFLAGS", "DEVICE"):  # `own` would read settings from these
        os.environ.pop(name, None)
    folder = Path(trial.RUNS, "gpu-trial" if trial.DEVICE == "cuda" else "gpu-trial-cpu")
    folder.mkdir(parents=True, exist_ok=True)
    run_missing(folder, commands_of(trial, folder), trial.LIMIT if trial.DEVICE == "cuda" else math.inf)
    print(f"report: {folder / 'report.md'}")


if __name__ == "__main__":
    run(main)
