"""The NVIDIA GPUs that a run may use, as the driver tells and as torch sees them."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

# The oldest driver for each CUDA that torch's wheels are built for (NVIDIA's CUDA release notes, table of minor-version
# compatibility), and the build of torch for older ones, and for older cards (recipes/torch_build.py).
DRIVERS = {11: 450, 12: 525, 13: 580}
OLDER = "make setup TORCH=cu126"


@dataclass(frozen=True)
class Gpu:
    index: str
    uuid: str
    name: str
    driver: str
    memory: float | None
    """In bytes; None of a part of a card (MIG)."""


def listed() -> list[Gpu]:
    """All of this machine's GPUs, as nvidia-smi tells; none without it."""
    query = ["nvidia-smi", "--query-gpu=index,uuid,name,driver_version,memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        rows = [[part.strip() for part in line.split(",")] for line in found.splitlines()]
        return [Gpu(index, uuid, name, driver, int(mib) * 2.0**20) for index, uuid, name, driver, mib in rows]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def visible() -> list[Gpu]:
    """Those in CUDA_VISIBLE_DEVICES, in its order: numbers, or beginnings of UUIDs, up to the first unknown."""
    there = listed()
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return there
    found: list[Gpu] = []
    for name in (name.strip() for name in wanted.split(",")):
        part = [Gpu(name, name, "MIG", there[0].driver, None)] if there and name.startswith("MIG-") else []
        known = part or [gpu for gpu in there if name and (gpu.index == name or gpu.uuid.startswith(name))]
        if len(known) != 1:
            break
        found += known
    return found


def restricted() -> str:
    """What to add where a number of GPUs is too small."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if wanted is None else f" (CUDA_VISIBLE_DEVICES is '{wanted}')"


def supported(capability: tuple[int, int], architectures: list[str]) -> bool:
    """Whether a torch built for these (sm_80, compute_90, ...) runs on a GPU of this capability.

    Machine code runs on the same major version from its minor version on; compute_XY is compiled again for later ones.
    """
    for name in architectures:
        kind, _, digits = name.partition("_")
        major, minor = int(digits.rstrip("af")[:-1]), int(digits.rstrip("af")[-1])
        if kind == "sm" and (capability[0] == major and capability[1] >= minor):
            return True
        if kind == "compute" and capability >= (major, minor):
            return True
    return False


def torch_fault(devices: int, precision: str, found: list[Gpu]) -> str | None:
    """Why this environment's torch cannot train on so many GPUs, in a sentence or two; None if it can."""
    import torch

    built = torch.version.cuda
    driver = found[0].driver if found else "unknown"
    if not built:
        return (
            f"torch {torch.__version__} is built for CPUs only, and the run needs a GPU. Take another build: make "
            "setup TORCH=cuda, or TORCH=cu126 for cards before compute capability 7.5, as the V100."
        )
    if not torch.cuda.is_available():
        least = DRIVERS.get(int(built.split(".")[0]))
        needs = f"which needs a driver of {least} or newer" if least else "which this driver may be too old for"
        return (
            f"torch {torch.__version__} finds no GPU: it is built for CUDA {built}, {needs}, and the driver here is "
            f"{driver}. Update the driver, or take a torch for older ones: {OLDER}"
        )
    if torch.cuda.device_count() < devices:
        return (
            f"torch {torch.__version__} finds {torch.cuda.device_count()} GPUs, and the run needs {devices}. Give "
            "GPUS=, or look at CUDA_VISIBLE_DEVICES."
        )
    architectures = torch.cuda.get_arch_list()
    for number in range(devices):
        capability = torch.cuda.get_device_capability(number)
        name = torch.cuda.get_device_name(number)
        if not supported(capability, architectures):
            return (
                f"GPU {number} ({name}) is sm_{capability[0]}{capability[1]}, and torch {torch.__version__} (CUDA "
                f"{built}) is built for {', '.join(architectures)}. Take one for older cards: {OLDER}"
            )
        if precision == "bf16" and capability < (8, 0):
            return f"GPU {number} ({name}) has no bf16, which comes with sm_80; take PRECISION=fp16."
    return None
