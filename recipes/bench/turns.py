"""Timing in turns: what else the machine does affects all sides alike, and a turn gives one ratio."""

from __future__ import annotations

import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable

import torch


def seconds(action: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    """Time of one call, until whatever it started on the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = clock()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - start


def spread(values: list[float]) -> str:
    """Median, lowest and highest."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def summary(values: list[float], name: str = "seconds") -> dict[str, float]:
    """The same, as the columns of a row."""
    return {name: statistics.median(values), "low": min(values), "high": max(values)}


def paired(ours: Callable, other: Callable, args: Namespace, tell: str) -> list[tuple[float, float]]:
    """Times of both actions in turns, the order swapped from pair to pair; the first two pairs are warm-up."""
    times = []
    pairs, device = args.pairs, torch.device(args.device)
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    for pair in range(pairs + 2):
        print(f"\r{tell}: pair {max(0, pair - 1)} of {pairs} ", end="", file=sys.stderr, flush=True)
        if pair % 2:
            second, first = seconds(other, device, clock), seconds(ours, device, clock)
        else:
            first, second = seconds(ours, device, clock), seconds(other, device, clock)
        times.append((first, second))
    print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)
    return times[2:]


def interleaved(actions: list[Callable[[], object]], rounds: int, clock: Callable, device: torch.device) -> list[list]:
    """Seconds of every action in every round, the order turned round from one to the next; the first is warm-up."""
    times: list[list[float]] = [[] for _ in actions]
    for turn in range(rounds + 1):
        order = range(len(actions)) if turn % 2 else reversed(range(len(actions)))
        for i in order:
            taken = seconds(actions[i], device, clock)
            if turn:
                times[i].append(taken)
    return times
