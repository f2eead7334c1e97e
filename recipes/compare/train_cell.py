"""Train one cell of a grid with fairseq-train, until the end or divergence, continuing where a killed call stopped.

    python -m recipes.compare.train_cell RUN/admin-18l-s1 --data RUN/bin --updates 300 -- --arch transformer_admin ...

appends fairseq's output to CELL/train.log and writes CELL/trained.json when the run is over. That a run diverges is its
result; any other way to fail (a wrong option, out of memory, a kill) is an error and leaves no trained.json.

Training goes in legs of --leg updates. A run ends early after a leg in which no validation is better than the best one
before it. Only the log decides, so a run that was killed ends where any other does (fairseq's --patience counts in the
process, and starts again with it).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from recipes.compare import cells
from recipes.compare.one_gpu import one_gpu
from recipes.steps.checkpoints import newest, reached
from recipes.steps.common import run, write_lines
from recipes.steps.guard import alone
from recipes.steps.logs import read_log
from recipes.steps.plugin import DIVERGED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--leg", type=int, help="updates in which a run must improve, or it ends early; default: all")
    parser.add_argument("--save-every", type=int, required=True, help="updates between checkpoints and validations")
    parser.add_argument("--from", dest="start", type=Path, help="a folder whose newest checkpoint to begin with")
    args, options = cells.parsed(parser)
    args.leg = min(args.leg or args.updates, args.updates)
    whole = args.save_every > 0 and args.leg >= args.save_every
    if not whole or args.updates % args.save_every or args.leg % args.save_every:
        raise ValueError(
            f"--updates {args.updates} and --leg {args.leg} are not multiples of --save-every {args.save_every}; the "
            "last update of every leg must be validated. Give UPDATES=, LEG= and SAVE_EVERY= that fit."
        )
    # Another make may be running the same grid: if it holds this cell, this call waits and then finds it done.
    with alone(args.cell / ".guard"):
        if not (args.cell / "trained.json").exists():
            print(f"{args.cell.name}: training{cells.told(args)}", flush=True)
            train(args, options)


def gained(valid: dict[int, float], leg: int, end: int) -> bool:
    """Whether the leg that ends with update `end` has a better validation than all before it; the first one has."""
    before = [bits for update, bits in valid.items() if update <= end - leg]
    within = [bits for update, bits in valid.items() if end - leg < update <= end]
    return not before or min(within) < min(before)


def train(args: argparse.Namespace, options: list[str]) -> None:
    stopped = False
    for end in [*range(args.leg, args.updates, args.leg), args.updates]:
        if reached(newest(args.cell / "checkpoints")) < end:
            stopped = not train_to(end, args, options)
        if stopped or not gained(read_log(args.cell / "train.log").valid, args.leg, end):
            break
    write_lines(args.cell / "trained.json", [json.dumps({"stopped": stopped})])
    early = "" if end == args.updates else f" to update {end}, no longer better"
    print(f"{args.cell.name}: {'stopped, diverged' if stopped else 'trained' + early}", flush=True)


def train_to(end: int, args: argparse.Namespace, options: list[str]) -> bool:
    """Train on to update `end`; False if the run diverged before it."""
    checkpoints, log = args.cell / "checkpoints", args.cell / "train.log"
    checkpoints.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "recipes.steps.train", str(args.data), "--user-dir", "fairseq_admin"]
    command += ["--finetune-from-model", str(newest(args.start))] if args.start else []
    command += ["--save-dir", str(checkpoints), "--keep-interval-updates", "1", "--no-last-checkpoints"]
    command += ["--save-interval-updates", str(args.save_every), "--validate-interval-updates", str(args.save_every)]
    command += ["--save-interval", "1000000", "--validate-interval", "1000000"]
    command += ["--max-update", str(end), "--log-format", "json"]
    # Batches of its own for every epoch, or a resumed run would see others than an uninterrupted one.
    command += ["--update-epoch-batch-itr", "True"]
    command += ["--distributed-world-size", "1", *options]
    with log.open("ab") as out, one_gpu(args.cell.parent, args.jobs) as environment:
        begin = out.seek(0, 2)
        status = subprocess.run(command, env=environment, stdout=out, stderr=subprocess.STDOUT).returncode
    if status and status != DIVERGED:
        output = log.read_bytes()[begin:].decode("utf-8", "replace").strip()
        last = (output or "nothing said").splitlines()[-1]
        raise ValueError(f"{args.cell}: fairseq-train ended with status {status}: {last} Its whole output: {log}.")
    return status == 0


if __name__ == "__main__":
    run(main)
