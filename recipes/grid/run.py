"""One run of a grid: train, until the end or divergence; judge it, write RUN/result.json, remove the checkpoints.

    python -m recipes.grid.run RUN

RUN/run.json says what it is (`Run`). Killed at any time, the same command goes on. That a run diverges is its result;
any other way to fail (a wrong option, out of memory, a kill) is an error and leaves no result.

Training goes in legs. A run ends early after a leg in which no validation is better than the best one before it. Only
the log decides, so a run that was killed ends where any other does (fairseq's --patience counts in the process, and
starts again with it).
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fairseq_admin.errors import DIVERGED
from recipes.grid.judge import JUDGES
from recipes.processes import stream
from recipes.steps.checkpoints import newest, reached
from recipes.steps.common import run, write_lines
from recipes.steps.guard import exclusive_folder
from recipes.steps.results import commit, hardware, read_log


@dataclass(frozen=True)
class Run:
    """What a run is, as its run.json has it."""

    axes: dict[str, str]
    """where in the grid it is"""
    data: str
    options: list[str]
    """fairseq-train's"""
    updates: int
    leg: int
    """updates in which it must improve, or it ends early"""
    save_every: int
    judge: str = ""
    """how it is judged, a name of JUDGES; empty: its checkpoints are what is wanted"""
    by: dict[str, Any] = field(default_factory=dict)
    """what the judge is told"""
    start: str = ""
    """a folder whose newest checkpoint it begins with"""

    def write(self, folder: Path) -> None:
        write_lines(folder / "run.json", [json.dumps(asdict(self), indent=1)])


def improved(valid: dict[int, float], leg: int, end: int) -> bool:
    """Whether the leg that ends with update `end` has a better validation than all before it; the first one has."""
    before = [bits for update, bits in valid.items() if update <= end - leg]
    within = [bits for update, bits in valid.items() if end - leg < update <= end]
    return not before or min(within) < min(before)


def train(folder: Path, spec: Run) -> str:
    """Train, leg by leg; write down whether it stopped itself, and say how it ended."""
    leg = min(spec.leg, spec.updates)
    stopped = False
    for end in [*range(leg, spec.updates, leg), spec.updates]:
        if reached(newest(folder / "checkpoints")) < end:
            stopped = not train_to(end, folder, spec)
        if stopped or not improved(read_log(folder / "train.log").valid, leg, end):
            break
    write_lines(folder / "trained.json", [json.dumps({"stopped": stopped})])
    early = "" if end == spec.updates else f" to update {end}, no longer better"
    return "stopped, diverged" if stopped else f"trained{early}"


def train_to(end: int, folder: Path, spec: Run) -> bool:
    """Train on to update `end`; False if the run diverged before it."""
    checkpoints, every = folder / "checkpoints", str(spec.save_every)
    checkpoints.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "recipes.steps.train", spec.data, "--user-dir", "fairseq_admin"]
    command += ["--finetune-from-model", str(newest(Path(spec.start)))] if spec.start else []
    command += ["--save-dir", str(checkpoints), "--keep-interval-updates", "1", "--no-last-checkpoints"]
    command += ["--save-interval-updates", every, "--validate-interval-updates", every]
    command += ["--save-interval", "1000000", "--validate-interval", "1000000"]
    command += ["--max-update", str(end), "--log-format", "json"]
    # Batches of its own for every epoch, or a resumed run would see others than an uninterrupted one.
    command += ["--update-epoch-batch-itr", "True"]
    command += ["--distributed-world-size", "1", *spec.options]
    return stream(command, folder / "train.log", accepted=(0, DIVERGED), updates=end) == 0


def main() -> None:
    (folder,) = map(Path, sys.argv[1:])
    spec = Run(**json.loads((folder / "run.json").read_text(encoding="utf-8")))
    trained, result = folder / "trained.json", folder / "result.json"
    with exclusive_folder(folder, wait=True):
        if not trained.exists():
            print(train(folder, spec), flush=True)
        if spec.judge and not result.exists():
            stopped = json.loads(trained.read_text(encoding="utf-8"))["stopped"]
            log = read_log(folder / "train.log", unfinished=stopped)
            row, message = JUDGES[spec.judge](folder, spec.data, log, stopped, **spec.by)
            write_lines(result, [json.dumps({**spec.axes, **row, "hardware": hardware(), "commit": commit()})])
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            print(message, flush=True)


if __name__ == "__main__":
    run(main)
