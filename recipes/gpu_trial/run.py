"""`make gpu-trial`: what only a GPU can show, as a list of commands and one report, RUNS/gpu-trial/report.md.

    python -m recipes.gpu_trial.run DATA=TEXT PAIR=de-en MINUTES=30    # DEVICE=cpu: every step with tiny sizes

The report is written again after each command, and each row is in rows.csv as soon as it is measured, so the trial may
be stopped anywhere. Started again, it runs the commands that have not ended well on this card, with this torch and at
this commit. On a GPU all but the trainings on a text end within LIMIT seconds of each call.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import torch
from pydantic import PositiveFloat

from recipes.processes import process_group
from recipes.recipe import collect
from recipes.settings import Data, Machine, Pair
from recipes.steps.common import run
from recipes.steps.results import commit, hardware
from recipes.validation import validated

TESTS = "python -m pytest -p no:cacheprovider -p no:warnings -n logical --maxprocesses 8"
TIMES = "python -m recipes.gpu_trial.times"
SIZES = "--tokens 4096 8192 16384"
SMALL = "--tokens 64 --cpu --encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16"
HALVES = ("fp16", "bf16")
COMMANDS = {
    "cuda": {
        "ceilings": "python -m recipes.gpu_trial.ceilings",
        **{f"{method}-{half}": f"{TIMES} {method} {SIZES} --{half}" for half in HALVES for method in ("fast", "stock")},
        "captured": f"{TIMES} fast --captured --tokens 8192 16384 --bf16",
        **{f"{method}-{half}": f"{TIMES} {method} {SIZES} --{half}" for half in HALVES for method in ("stock-adamw",)},
        **{f"compiled-{half}": f"{TIMES} compiled --tokens 8192 16384 --{half}" for half in HALVES},
        **{
            f"bert-{method}": f"python -m recipes.gpu_trial.bert {method}"
            for method in ("stock", "attached", "compiled")
        },
        **{f"plain-{half}": f"{TIMES} plain {SIZES} --{half}" for half in HALVES},
        "kernels": f"{TESTS} tests/test_cuda.py -m cuda",
        "trainings": f"{TESTS} -m cuda tests --ignore tests/test_cuda.py",
    },
    "cpu": {
        "ceilings": "python -m recipes.gpu_trial.ceilings --cpu",
        **{f"{method}-fp32": f"{TIMES} {method} {SMALL}" for method in ("fast", "stock")},
        "captured": f"{TIMES} fast --captured {SMALL}",
        **{f"{method}-fp32": f"{TIMES} {method} {SMALL}" for method in ("stock-adamw", "compiled")},
        **{
            f"bert-{method}": f"python -m recipes.gpu_trial.bert {method} --cpu"
            for method in ("stock", "attached", "compiled")
        },
        "plain-fp32": f"{TIMES} plain {SMALL}",
        "kernels": f"{TESTS} tests/test_cuda.py -m 'not slow'",
    },
}
"""By device, the most informative first; the tests last."""
ON_TEXT = {
    "cuda": "PRESET=gpu TOKENS=8192 UPDATES={updates} WARMUP={warmup} SAVE_EVERY={every}",
    "cpu": "PRESET=cpu LAYERS=1 WIDTH=16 FFN=32 HEADS=2 MAX_TOKENS=256 MERGES=200 SAVE_EVERY=2 AVERAGE=2 UPDATES=6",
}
RATES = {"admin": 3e-4, "pre-ln": 3e-4, "post-ln": 1e-4}
"""Each method's own: the best of `make compare` with 18 layers (docs/compare.csv), Admin's with INIT=reference."""
RESULT = re.compile(r"row: |=* ?\d+ (passed|failed|skipped|error)|FAILED|sacreBLEU +\d|update \d+ +\d")
"""How a line begins that the report repeats: a time, a count of tests, a test that failed, a score, a validation."""
REPORT = "Each command's whole output is next to this file. To paste into an issue:\n\n```\n{}\n```\n"


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
    """Names and commands; after the others, with 18 layers on a text, as many updates of each method as fill the
    minutes by the step time measured."""
    yield from COMMANDS[trial.DEVICE].items()
    measured = re.search("what fast, precision fp16, tokens 8192, ms ([0-9.]+)", "\n".join(log_of(folder, "fast-fp16")))
    updates = 10 * max(3, round(6000 * trial.MINUTES / (float(measured[1]) if measured else 200)))
    settings = ON_TEXT[trial.DEVICE].format(updates=updates, warmup=min(4000, updates // 4), every=updates // 10)
    words = f"PAIR={trial.PAIR} RUNS={shlex.quote(f'{folder}/text')}"
    for method, rate in (RATES if trial.DATA else {}).items():
        yield f"text-{method}", f"python -m recipes own {words} {settings} METHOD={method} INIT=reference LR={rate}"


def made_by() -> str:
    return f"{hardware()}, torch {torch.__version__}, CUDA {torch.version.cuda}, commit {commit()}"


def log_of(folder: Path, name: str) -> list[str]:
    """The lines of a command's log, if it was run. The first says on what, and the command; the last how it ended."""
    path = folder / f"{name}.log"
    return (path.read_text(errors="replace").splitlines() if path.exists() else []) or ["not run"]


def perform(command: str, path: Path, limit: float, said: str) -> None:
    """Run a command into its log; when its time is up, or the trial ends, all that it started ends."""
    began = time.monotonic()
    where = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    where |= {"ROWS": str(path.parent.absolute() / "rows.csv"), "COMMIT": commit()}
    where.setdefault("TORCHINDUCTOR_CACHE_DIR", str(path.parent.absolute() / "compiled"))
    with path.open("w") as log, process_group() as group:
        print(said, file=log, flush=True)
        try:
            done = subprocess.run(
                command, shell=True, env=where, stdout=log, stderr=log, timeout=limit, process_group=group.pid
            )
            ended = f"status {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = "stopped, its time was up"
        log.write(f"\n{ended}, {time.monotonic() - began:.0f} s\n")


def run_missing(folder: Path, commands: Iterable[tuple[str, str]], limit: float) -> None:
    """Run the commands that have not ended well, those without a text within the limit; report on all after each."""
    end = time.monotonic() + limit
    block = [made_by()]
    for name, command in commands:
        left = math.inf if name.startswith("text-") else end - time.monotonic()
        log, said = log_of(folder, name), f"{block[0]}: {command}"
        if log[0] != said:
            log = ["not run"]
        if not log[-1].startswith("status 0,") and left > 0:
            print(f"{name}: {command}", flush=True)
            perform(command, folder / f"{name}.log", left, said)
            log = log_of(folder, name)
        block.append(f"{name}: {log[-1]}: {command}")
        block += ["  " + " ".join(line.split()) for line in log if RESULT.match(line)]
        (folder / "report.md").write_text(REPORT.format("\n".join(block)), encoding="utf-8")


def main() -> None:
    chosen = collect("gpu-trial", sys.argv[1:], list(Trial.model_fields))
    os.environ.update(chosen)
    trial = validated(Trial, {name: value for name, value in chosen.items() if value})
    if trial.DEVICE == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        raise ValueError("This machine has no GPU that torch can use; DEVICE=cpu tries the trial itself.")
    for name in ("MAKEFLAGS", "DEVICE"):  # in which `own` would find settings of its own
        os.environ.pop(name, None)
    folder = Path(trial.RUNS, "gpu-trial" if trial.DEVICE == "cuda" else "gpu-trial-cpu")
    folder.mkdir(parents=True, exist_ok=True)
    run_missing(folder, commands_of(trial, folder), trial.LIMIT if trial.DEVICE == "cuda" else math.inf)
    print(f"report: {folder / 'report.md'}")


if __name__ == "__main__":
    run(main)
