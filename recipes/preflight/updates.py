"""A few real updates of a training, and when each was told."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from fairseq_admin.logs import stats
from recipes.processes import process_group

# The first updates profile, allocate and compile, and are not timed.
WARM_UP = 3


def intervals(lines: Iterable[tuple[float, str]]) -> list[dict]:
    """fairseq's intervals of one update each, with the time `at` which each was told. (Its own are whole seconds.)"""
    found = [(when, stats(line)) for when, line in lines]
    return [{**values[1], "at": when} for when, values in found if values and values[0] == "train_inner"]


def run_updates(options: list[str], data: Path, folder: Path, updates: int, limit: float) -> list[dict]:
    """Train so many updates; the intervals of those that were made within `limit` seconds.

    Args:
        options: fairseq-train's, but for the data and how long to train.
        folder: where its checkpoints would be.

    Raises:
        ValueError: too few were made to time them.
    """
    command = [sys.executable, "-m", "recipes.steps.train", str(data), *options]
    command += ["--max-update", str(updates), "--no-save", "--disable-validation"]
    command += ["--save-dir", str(folder), "--log-format", "json", "--log-interval", "1"]
    with process_group() as group, subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", process_group=group
    ) as process:  # fmt: skip
        clock = threading.Timer(limit, process.terminate)
        clock.start()
        lines = [(time.monotonic(), line.rstrip("\n")) for line in process.stdout or ()]
        clock.cancel()
    found = intervals(lines)
    if len(found) < WARM_UP + 2:
        said = next((line for _, line in reversed(lines) if line.strip()), "nothing said")
        raise ValueError(f"{len(found)} updates in {limit:.0f} s at most; the last line: {said}")
    return found


def seconds(found: list[dict]) -> float:
    """Of an update, after the first ones."""
    timed = found[WARM_UP:]
    return (timed[-1]["at"] - timed[0]["at"]) / (len(timed) - 1)
