"""Timing in turns: what else the machine does affects all sides alike, and a turn gives one ratio."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch


def seconds(action: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    """Time of one call, until whatever it started on the device has finished."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = clock()
    action()
    wait()
    return clock() - start


def interleaved(actions: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """CPU time of every action in every round, the order turned round from one to the next; the first is warm-up."""
    times: list[list[float]] = [[] for _ in actions]
    for turn in range(rounds + 1):
        order = range(len(actions)) if turn % 2 else reversed(range(len(actions)))
        for i in order:
            times[i].append(seconds(actions[i], torch.device("cpu"), time.process_time))
    return [taken[1:] for taken in times]


def ratio(times: Sequence[float], stock: Sequence[float]) -> tuple[float, float, float]:
    """What one side took as a share of the other, a ratio a turn: the median, the lowest and the highest."""
    ratios = sorted(a / b for a, b in zip(times, stock))
    return statistics.median(ratios), ratios[0], ratios[-1]
