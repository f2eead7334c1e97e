"""Times of calls, and the machine that they were measured on. This file imports only torch, as stock runs require."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch


def machine() -> dict[str, str]:
    """Columns that say where a row was measured: card or CPU, versions, and code."""
    from recipes.steps.results import commit  # imports fairseq_admin

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    device = next((line.split(": ")[1] for line in lines if "model name" in line), platform.machine())
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    return {"device": device, "torch": torch.__version__, "python": platform.python_version(), "commit": commit()}


def synchronize() -> None:
    """Wait until a GPU, if there is one, has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(action: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    """Seconds of an action, its work on a GPU included."""
    synchronize()
    start = clock()
    action()
    synchronize()
    return clock() - start


def interleaved(
    actions: Sequence[Callable[[], object]], rounds: int, clock: Callable[[], float] = time.process_time
) -> list[list[float]]:
    """Seconds of each action in each round.

    The actions take turns, so other work on the machine affects all alike. A round of warm-up comes first. The order
    is reversed from one round to the next.
    """
    times: list[list[float]] = [[] for _ in actions]
    for turn in range(rounds + 1):
        for number in sorted(range(len(actions)), reverse=turn % 2 == 0):
            times[number].append(seconds(actions[number], clock))
    return [each[1:] for each in times]


def timed(times: Sequence[float], stock: Sequence[float], name: str) -> dict[str, float]:
    """Columns of one side: the median in ms, and the median ratio to stock with its lowest and highest.

    Args:
        times: seconds of each round.
        stock: likewise.
        name: what was timed.
    """
    ratios = sorted(a / b for a, b in zip(times, stock))
    medians = {f"{name}_ms": 1000 * statistics.median(times), name: statistics.median(ratios)}
    return {**medians, f"{name}_low": ratios[0], f"{name}_high": ratios[-1]}
