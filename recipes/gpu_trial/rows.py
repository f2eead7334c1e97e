"""The trial's rows: each is printed, and appended to the file ROWS as it comes. This imports torch alone."""

from __future__ import annotations

import csv
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

COLUMNS = (
    *("what", "precision", "tokens", "ms", "low", "high", "tflops", "mfu", "gb_s"),
    *("device_ms", "launches", "idle", "step_gib", "attention", "updates", "graphs", "compile_s"),
    *("device", "torch", "python", "commit"),
)


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def write(**row: Any) -> None:
    """Print a row's columns, and append it to the file that the environment's ROWS names."""
    row = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in row.items()}
    print("row:", ", ".join(f"{name} {value}" for name, value in row.items() if value is not None), flush=True)
    row |= {"device": device_name(), "torch": torch.__version__, "python": platform.python_version()}
    row["commit"] = os.environ.get("COMMIT")
    if path := os.environ.get("ROWS"):
        is_new = not Path(path).exists()
        with open(path, "a", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, COLUMNS)
            if is_new:
                table.writeheader()
            table.writerow(row)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(action: Callable[[], object]) -> float:
    """Wall time of one call, until whatever it started on the device has finished."""
    synchronize()
    start = time.perf_counter()
    action()
    synchronize()
    return time.perf_counter() - start


def spread(times: list[float]) -> dict[str, float]:
    """The columns of times: their mean, the lowest and the highest, in ms."""
    return {"ms": 1000 * statistics.mean(times), "low": 1000 * min(times), "high": 1000 * max(times)}


def on_device(action: Callable[[], object], ms: float) -> dict[str, Any]:
    """Of one call: the device's own time, its kernels, and the share of `ms`, the wall time, that it is idle."""
    with torch.profiler.profile() as profile:
        action()
        synchronize()
    kernels = [event for event in profile.key_averages() if "CUDA" in str(event.device_type)]
    if not kernels:
        return {}
    device_ms = sum(event.self_device_time_total for event in kernels) / 1000
    return {"device_ms": device_ms, "launches": sum(event.count for event in kernels), "idle": 1 - device_ms / ms}
