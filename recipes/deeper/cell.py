"""Train one classifier of the grid of `make deeper`, going on where a killed call stopped, and test it.

    python -m recipes.deeper.cell CELL scheme=admin layers=8 lr=1e-3 seed=1 --data BIN --encoder PT --updates 900 -- ...

writes CELL/result.json and removes the checkpoints. What follows -- goes to fairseq-train. That a run diverges is its
result, with accuracy 0.5, a guess; any other failure is an error.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from recipes.compare.one_gpu import one_gpu
from recipes.steps.common import run, write_lines
from recipes.steps.guard import alone
from recipes.steps.plugin import DIVERGED
from recipes.steps.results import commit, hardware

GUESS = 0.5


def fairseq(command: str, cell: Path, jobs: int, *options: object) -> int:
    """Run a command of fairseq, its output appended to CELL/COMMAND.log; returns its status."""
    log = cell / f"{command}.log"
    with log.open("ab") as out, one_gpu(cell.parent, jobs) as environment:
        given = [sys.executable, "-m", f"fairseq_cli.{command}", *map(str, options), "--user-dir", "fairseq_admin"]
        status = subprocess.run(given, env=environment, stdout=out, stderr=subprocess.STDOUT).returncode
    if status and status != DIVERGED:
        last = (log.read_text(encoding="utf-8", errors="replace").strip() or "nothing said").splitlines()[-1]
        raise ValueError(f"{cell}: fairseq's {command} ended with status {status}: {last} Its output: {log}.")
    return status


def accuracy(log: str) -> float:
    """The last accuracy, 0 to 1, in the log of a validation.

    Raises:
        ValueError: there is none.
    """
    found = re.findall(r"\| accuracy ([0-9.]+)", log) or re.findall(r'"[a-z_]*accuracy": "?([0-9.]+)', log)
    if not found:
        raise ValueError("the log has no accuracy; expected one for a validation. Run it again with the log removed.")
    return float(found[-1]) / 100


def tested(cell: Path, subset: str, args: argparse.Namespace, device: list[str]) -> float:
    """The accuracy of the last checkpoint on a subset."""
    (cell / "validate.log").unlink(missing_ok=True)
    path = cell / "checkpoints/checkpoint_last.pt"
    given = [args.data, "--path", path, "--task", "sentence_prediction", "--criterion", "sentence_prediction"]
    given += ["--num-classes", 2, "--valid-subset", subset, "--max-tokens", 4000]
    # With fairseq's 8, two of fifty sentences were left out of the accuracy.
    given += ["--required-batch-size-multiple", 1, "--log-format", "simple"]
    fairseq("validate", cell, args.jobs, *given, "--max-positions", args.max_positions, *device)
    return accuracy((cell / "validate.log").read_text(encoding="utf-8"))


def main() -> None:
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cell", type=Path, help="the run's folder")
    parser.add_argument("axes", nargs="+", metavar="NAME=VALUE", help="where in the grid it is")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--encoder", type=Path, required=True, help="the pre-trained encoder's checkpoint")
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--max-positions", type=int, required=True)
    parser.add_argument("--jobs", type=int, default=1, help="cells running side by side, spread over the GPUs")
    args = parser.parse_args(arguments[:split])
    options = arguments[split + 1 :]
    device = ["--cpu", "--num-workers", "0"] if "--cpu" in options else []
    args.cell.mkdir(parents=True, exist_ok=True)
    with alone(args.cell / ".guard"):
        if (args.cell / "result.json").exists():
            return
        given = [args.data, "--finetune-from-model", args.encoder, "--save-dir", args.cell / "checkpoints"]
        given += ["--max-update", args.updates, "--max-positions", args.max_positions, "--no-epoch-checkpoints"]
        stopped = fairseq("train", args.cell, args.jobs, *given, *options) != 0
        valid, test = (GUESS if stopped else tested(args.cell, it, args, device) for it in ("valid", "test"))
        row = {**dict(axis.split("=", 1) for axis in args.axes), "diverged": stopped, "valid": valid, "test": test}
        row.update(hardware=hardware(), commit=commit())
        write_lines(args.cell / "result.json", [json.dumps(row)])
        shutil.rmtree(args.cell / "checkpoints", ignore_errors=True)
    print(f"{args.cell.name}: {'diverged' if stopped else f'accuracy {test:.3f}'}", flush=True)


if __name__ == "__main__":
    run(main)
