"""The memory of a process, or what it takes of a device's, in MiB."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

import torch

# Given back at once: what malloc keeps for later is no one's memory.
BLOCKS_OF_THEIR_OWN = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}
"""The environment of a process whose memory is measured."""


def _status(name: str) -> float | None:
    status = Path("/proc/self/status")
    found = re.search(rf"{name}:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) / 2**10 if found else None


def _most() -> float:
    """The peak by getrusage: on Linux not to be trusted, as a child begins with its parent's across exec."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def peak(device: torch.device) -> float:
    """The peak so far: of the device's memory on a GPU, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return _status("VmHWM") or _most()


def resident(device: torch.device) -> float:
    """What is taken now, likewise; where a process's is not known, its peak so far."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / 2**20
    return _status("VmRSS") or _most()
