"""What this machine has: driver, GPUs, torch, memory, room, a network."""

from __future__ import annotations

import os
import re
import shutil
import socket
from pathlib import Path
from urllib.parse import urlparse

from recipes.steps import gpus
from recipes.steps.table import read_table

GB = 1e9


def hardware(on_cpu: bool) -> list[str]:
    """Driver, GPUs, torch's CUDA, and the precisions they have, a line each."""
    import torch

    there = gpus.visible()
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    text = [f"torch {torch.__version__}, built for {built}; {torch.get_num_threads()} CPU threads"]
    if on_cpu:
        text.append("trains on the CPU: fp32")
    elif there:
        names = ", ".join(f"{gpu.name} {'?' if gpu.memory is None else f'{gpu.memory / GB:.1f}'} GB" for gpu in there)
        text.append(f"driver {there[0].driver}; {len(there)} GPUs{gpus.restricted()}: {names}")
        if torch.cuda.is_available():
            half = torch.cuda.get_device_capability(0) >= (8, 0)
            text.append(f"precisions: fp16, me-fp16, amp, fp32{', bf16' if half else '; no bf16'}")
    else:
        text.append(f"no GPU{gpus.restricted()}")
    return text


def free_memory() -> float | None:
    """Bytes of this machine's memory that are free, where that is known."""
    path = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", path.read_text()) if path.exists() else None
    return int(found[1]) * 1024.0 if found else None


def free_disk(folder: Path) -> float:
    """Bytes free where the folder is, or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def archive_bytes(names: list[str], table: Path) -> float:
    """The archives' bytes, of those whose size is published."""
    return sum(entry.size or 0 for name, entry in read_table(table).items() if name in names)


def reachable(names: list[str], table: Path, url: str) -> bool:
    """Whether a server of the first archive's answers a connection."""
    addresses = [url] if url else list(read_table(table)[names[0]].urls)
    for address in map(urlparse, addresses):
        try:
            port = address.port or (80 if address.scheme == "http" else 443)
            with socket.create_connection((address.hostname or "", port), timeout=5):
                return True
        except OSError:
            continue
    # A proxy may reach what this machine cannot.
    return bool(os.environ.get("https_proxy") or os.environ.get("HTTPS_PROXY"))
