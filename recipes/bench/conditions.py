"""Where and with what something was measured, kept with it (--csv)."""

from __future__ import annotations

import csv
import os
import platform
from pathlib import Path
from typing import Any

import torch

from recipes.steps.common import replacing
from recipes.steps.results import commit


def conditions() -> dict[str, Any]:
    """Where and with what: hardware, what else it does (processes that run, over the last minute), versions, commit."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return {
        "commit": commit(),
        "device": next((line.split(": ")[1] for line in lines if "model name" in line), platform.machine()),
        "load": round(os.getloadavg()[0], 1),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def keep(file: Path | None, where: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write what was found as CSV, every row with its conditions, if there is a file to write to (--csv)."""
    if not file or not rows:
        return
    with replacing(file) as part, part.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, [*rows[0], *where], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **where} for row in rows)
