"""The NVIDIA GPUs that a run may use, by the driver; and whether torch can train on them.

python -m recipes.steps.gpus 2 bf16     # if torch cannot, say why and end with status 1
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    index: str
    uuid: str
    name: str
    memory: float | None
    """In bytes; None for a part of a card (MIG)."""


def visible() -> list[Gpu]:
    """This machine's GPUs, by nvidia-smi; no GPUs without nvidia-smi.

    CUDA_VISIBLE_DEVICES selects and orders them, by numbers or beginnings of UUIDs. As in CUDA, the first unknown name
    ends the list.
    """
    query = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        rows = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
        cells = [[part.strip() for part in line.split(",")] for line in rows]
        cards = [Gpu(index, uuid, name, int(mib) * 2.0**20) for index, uuid, name, mib in cells]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen: list[Gpu] = []
    for name in [name.strip() for name in wanted.split(",")] if wanted is not None else [gpu.index for gpu in cards]:
        part = [Gpu(name, name, "MIG", None)] if cards and name.startswith("MIG-") else []
        known = part or [gpu for gpu in cards if name and (gpu.index == name or gpu.uuid.startswith(name))]
        if len(known) != 1:
            break
        chosen += known
    return chosen


def main() -> None:
    import torch

    devices, precision = int(sys.argv[1]), sys.argv[2]
    works = 0
    try:
        for number in range(devices):
            torch.ones(1, device=f"cuda:{number}").add(1)
            works += 1
    except (AssertionError, RuntimeError) as error:  # a build without CUDA, an old driver or card, too few cards
        reason = str(error).partition("\n")[0].rstrip(".")
        variable = os.environ.get("CUDA_VISIBLE_DEVICES")
        reason += "" if variable is None else f"; CUDA_VISIBLE_DEVICES={variable}"
        print(
            f"torch {torch.__version__} runs on {works} GPUs here ({reason}), and the run needs {devices}. Give GPUS=, "
            "or take another build: make setup TORCH=cuda, or TORCH=cu126 for cards before compute capability 7.5 and "
            "older drivers."
        )
        raise SystemExit(1) from None
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        print("The GPUs here have no bf16, which comes with compute capability 8.0; take PRECISION=fp16.")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
