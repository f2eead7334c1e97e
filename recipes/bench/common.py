"""What the benches share: timing in turns, a model's size, and tables of rows that say where they were measured.

In turns, what else the machine does affects all sides alike, and a turn gives one ratio.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import platform
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from recipes.compare.rows import Row, write_runs
from recipes.steps.results import commit

FORM = "LAYERS[-DECODER_LAYERS]:WIDTH:TOKENS"


def size(text: str) -> Row:
    """A model's size and tokens in the form FORM. Heads have 64 channels, or there are two."""
    match = re.fullmatch(r"([1-9]\d*)(?:-([1-9]\d*))?:([1-9]\d*):([1-9]\d*)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; expected {FORM}, as 60-12:512:1024")
    layers, decoder_layers, width, tokens = (int(number or match[1]) for number in match.groups())
    sizes = {"layers": layers, "decoder_layers": decoder_layers, "width": width, "tokens": tokens}
    return {**sizes, "ffn": 4 * width, "heads": math.gcd(width, max(2, width // 64))}


def output(given: str) -> Path:
    """A file to write. It is opened at once: what cannot be written is said before anything is measured."""
    path = Path(given)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{given} cannot be written: {error.strerror}") from None
    return path


def parser(about: str | None) -> argparse.ArgumentParser:
    """A bench's, with --pairs and --csv."""
    top = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--pairs", type=int, default=15, help="turns (default: %(default)s)")
    top.add_argument("--csv", type=output, help="file to write the rows to")
    return top


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


def timed(times: Sequence[float], stock: Sequence[float], name: str, share: str) -> Row:
    """The columns of one side's times: milliseconds, and the ratio with its range."""
    middle, low, high = ratio(times, stock)
    return {f"{name}_ms": 1000 * statistics.median(times), share: middle, f"{share}_low": low, f"{share}_high": high}


def report(tables: Iterable[list[Row]], file: Path | None) -> None:
    """Measure on one thread: print the tables as they come, and write all rows with where they were measured."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # fairseq's and its libraries', of one another
    logging.disable(logging.INFO)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    where: dict[str, Any] = {
        "commit": commit(),
        "device": next((line.split(": ")[1] for line in lines if "model name" in line), platform.machine()),
        "load": round(os.getloadavg()[0], 1),  # processes that run, over the last minute
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    print(", ".join(f"{name} {value}" for name, value in where.items()), flush=True)
    rows: list[Row] = []
    for table in tables:
        print(tabulate(table, headers="keys", floatfmt=".3f"), flush=True)
        rows += [{**row, **where} for row in table]
    if file:
        write_runs(file, rows)
