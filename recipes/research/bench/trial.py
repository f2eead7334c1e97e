"""`make gpu-trial`: the measurements of bench/gpu.py, each in a process of its own, and a table of their rows.

    python -m recipes.research.bench.trial RUNS=runs    # runs/gpu-trial/rows.csv
    python -m recipes.research.bench.trial DEVICE=cpu   # tiny sizes, in runs/gpu-trial-cpu, to try it

NAME.log has a row as soon as it is measured, so the trial may be stopped at any time. Started again, it repeats only
the measurements that have not succeeded on this card, with this torch and at this commit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from recipes.processes import process_group
from recipes.research.bench.common import machine
from recipes.settings import collect
from recipes.steps.common import run
from recipes.steps.results import write_runs

PRECISIONS = {"cuda": ("fp16", "bf16"), "cpu": ("fp32",)}
DONE = "status 0"
"""The last line of a log whose measurement has succeeded."""


def names_for(precisions: Sequence[str]) -> list[str]:
    """The measurements, the most informative first."""
    first = ("text-readme", "text-stock-adamw", "memory", "graph", "fast", "stock-adamw")
    ours = [f"{method}-{precision}" for precision in precisions for method in first]
    others = [f"{method}-{precision}" for method in ("stock", "plain") for precision in precisions]
    return ["ceilings", *ours, *others, "bert-stock", "bert-attached", "bert-compiled"]


def measure(folder: Path, names: Sequence[str]) -> None:
    """Run the measurements that have not succeeded here. After each, write rows.csv."""
    here, rows = machine(), []
    for name in names:
        path = folder / f"{name}.log"
        log = path.read_text(errors="replace").splitlines() if path.exists() else []
        if log[:1] != [str(here)] or log[-1] != DONE:
            print(name, flush=True)
            with path.open("w") as out, process_group() as group:
                print(here, file=out, flush=True)
                command = [sys.executable, "-m", "recipes.research.bench.gpu", name]
                done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, process_group=group.pid)
                print(f"\nstatus {done.returncode}", file=out)
            log = path.read_text(errors="replace").splitlines()
            print("\n".join(line for line in log if line.startswith(("row: ", "status"))), flush=True)
        rows += [{**json.loads(line.removeprefix("row: ")), **here} for line in log if line.startswith("row: ")]
        write_runs(folder / "rows.csv", rows)


def main() -> None:
    usual = {"RUNS": "runs", "DEVICE": "cuda"}
    settings = usual | collect("gpu-trial", sys.argv[1:], list(usual))
    device = settings["DEVICE"]
    if device not in PRECISIONS:
        raise ValueError(f"DEVICE={device} is unknown; expected cuda or cpu.")
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        raise ValueError("This machine has no GPU that torch can use; DEVICE=cpu tries the trial itself.")
    folder = Path(settings["RUNS"], "gpu-trial" if device == "cuda" else "gpu-trial-cpu")
    folder.mkdir(parents=True, exist_ok=True)
    measure(folder, names_for(PRECISIONS[device]))
    print(f"rows: {folder / 'rows.csv'}")


if __name__ == "__main__":
    run(main)
