"""The command line of the benches, and their tables. Each row of a table says where it was measured."""

from __future__ import annotations

import argparse
import logging
import os
import platform
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
from tabulate import tabulate

from recipes.compare.rows import Row, write_runs
from recipes.steps.results import commit


def parser(about: str | None) -> argparse.ArgumentParser:
    """The parser of a bench's command line, with the options --pairs and --csv."""
    top = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--pairs", type=int, default=15, help="turns (default: %(default)s)")
    top.add_argument("--csv", type=Path, help="file to write the rows to")
    return top


def machine() -> dict[str, str]:
    """Columns that say where a row was measured: code, card or CPU, and versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    device = next((line.split(": ")[1] for line in lines if "model name" in line), platform.machine())
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    return {"device": device, "torch": torch.__version__, "python": platform.python_version(), "commit": commit()}


def report(tables: Iterable[list[Row]], file: Path | None) -> None:
    """Measure on one thread. Print each table, and write its rows to the file."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # fairseq and its libraries warn about each other
    logging.disable(logging.INFO)
    here = {**machine(), "load": round(os.getloadavg()[0], 1)}  # mean number of running processes in the last minute
    print(", ".join(f"{name} {value}" for name, value in here.items()), flush=True)
    rows: list[Row] = []
    for table in tables:
        print(tabulate(table, headers="keys", floatfmt=".3f"), flush=True)
        rows += [{**row, **here} for row in table]
        if file:
            write_runs(file, rows)
