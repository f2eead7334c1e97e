"""Which torch `make setup` installs: the build that fits the card that is here, or the one that is asked for.

All builds are of the version that the tests run with. cu126 is the only one with kernels for cards before compute
capability 7.5, as the V100 is, since torch 2.11 (pytorch#172352), and takes drivers too old for CUDA 13; torch 2.14 is
the last version that has it (pytorch#190385). Only the cpu build has been run.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from pathlib import Path

VERSION = "2.13.0"
INDEX = "--extra-index-url https://download.pytorch.org/whl"
"""For torch alone: what it needs is on PyPI."""
# PyPI has the build of today's CUDA for Linux; elsewhere it has one for CPUs.
BUILDS = {
    "cpu": f"torch=={VERSION}+cpu {INDEX}/cpu" if platform.system() == "Linux" else f"torch=={VERSION}",
    "cuda": f"torch=={VERSION}",
    "cu126": f"torch=={VERSION}+cu126 {INDEX}/cu126",
}
TODAYS_CAPABILITY, TODAYS_DRIVER = 7.5, 580
"""The oldest card and driver of the build `cuda`. The driver: NVIDIA's table of minor-version compatibility."""


def cards() -> list[tuple[float, int]]:
    """Compute capability and driver of each card here, as nvidia-smi says; none without it."""
    query = ["nvidia-smi", "--query-gpu=compute_cap,driver_version", "--format=csv,noheader"]
    try:
        rows = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [(float(capability), int(driver)) for capability, driver in re.findall(r"(\d+\.\d+), (\d+)", rows)]


def fitting(there: list[tuple[float, int]]) -> str:
    """The build for these cards."""
    if not there:
        return "cpu"
    old = any(capability < TODAYS_CAPABILITY or driver < TODAYS_DRIVER for capability, driver in there)
    return "cu126" if old else "cuda"


def check(asked: str) -> None:
    """Refuse what TORCH= cannot be.

    Raises:
        ValueError: it is not a build, and not a requirement of torch.
    """
    if asked and asked not in BUILDS and not asked.startswith("torch"):
        raise ValueError(f"TORCH={asked} is unknown; expected one of {' '.join(BUILDS)}, or pip's, as torch==2.7.1.")


def arguments(held: Path) -> list[str]:
    """What pip is to install.

    Args:
        held: a file with the name of a build, or a requirement of pip. Where it is empty, the build that fits is
            chosen and its name kept there, so that a machine without a card does not change it later.
    """
    asked = held.read_text(encoding="utf-8").strip()
    if not asked:
        asked = fitting(cards())
        held.write_text(f"{asked}\n", encoding="utf-8")
        print(f"torch: the build {asked}, by the cards that are here; TORCH= takes another.", file=sys.stderr)
    return BUILDS.get(asked, asked).split()
