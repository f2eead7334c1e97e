"""A run's devices and machines, options of a precision, and how the tokens of an update are divided among them.

An update has the same number of tokens on every machine, so results are comparable.

    python -m recipes.machines 2 bf16     # if torch cannot train on two GPUs, say why and end with status 1
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass

from recipes.options import Options
from recipes.processes import in_cluster_job
from recipes.settings import Settings

SCALED = "--fp16-scale-window 256 --threshold-loss-scale 0.03125"
PRECISIONS = {
    "fp32": "",
    "fp16": f"--fp16 --fp16-no-flatten-grads {SCALED}",
    "me-fp16": f"--memory-efficient-fp16 {SCALED}",
    "amp": "--amp",
    "bf16": "--bf16 --fp16-no-flatten-grads",
}
ON_CPUS = ["--distributed-no-spawn", "--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp"]
MIN_BATCH_TOKENS = 1024
"""Smallest batch that an update is divided into."""
BUILDS = "make setup TORCH=cuda, or TORCH=cu126 for cards before compute capability 7.5 and older drivers"
"""How to get a torch that runs on GPUs."""


@dataclass(frozen=True)
class Gpu:
    index: str
    uuid: str
    memory: float
    """In GB; infinite for a part of a card (MIG), whose memory is not known"""


def visible_gpus() -> list[Gpu]:
    """This machine's GPUs, by nvidia-smi; no GPUs without nvidia-smi.

    CUDA_VISIBLE_DEVICES selects and orders them, by numbers or beginnings of UUIDs. As in CUDA, the first unknown name
    ends the list.
    """
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        rows = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
        cells = [[part.strip() for part in line.split(",")] for line in rows]
        cards = [Gpu(index, uuid, int(mib) * 2**20 / 1e9) for index, uuid, mib in cells]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen: list[Gpu] = []
    for name in [name.strip() for name in wanted.split(",")] if wanted is not None else [gpu.index for gpu in cards]:
        part = [Gpu(name, name, math.inf)] if cards and name.startswith("MIG-") else []
        known = part or [gpu for gpu in cards if name and (gpu.index == name or gpu.uuid.startswith(name))]
        if len(known) != 1:
            break
        chosen += known
    return chosen


def largest(visible: list[Gpu], count: int | None) -> list[Gpu]:
    """The GPUs to train on, the largest first: `count` of them, or else those with half of the largest one's memory.

    So a second, small card for a display does not count.
    """
    cards = sorted(visible, key=lambda gpu: -gpu.memory)
    return cards[:count] if count else [gpu for gpu in cards if gpu.memory >= cards[0].memory / 2]


@dataclass(frozen=True)
class Machines:
    """The machines of a run, and its batches."""

    cpu: bool
    gpus: int
    """number of GPUs per machine; 1 on a CPU"""
    nodes: int
    node: int
    """number of this machine, from 0"""
    max_tokens: int
    update_freq: int
    smaller_batch: int = 0
    """--max-tokens to give if a GPU runs out of memory; 0: unknown"""
    cards: str = ""
    """the UUIDs of the GPUs to train on, for CUDA_VISIBLE_DEVICES; empty: all that are visible"""

    def __str__(self) -> str:
        """The parts of an update: nodes x devices x batches."""
        return f"{self.nodes} x {self.gpus} x {self.update_freq} batches of up to {self.max_tokens} tokens"

    @property
    def tokens(self) -> int:
        """Largest number of tokens in an update."""
        return self.max_tokens * self.update_freq * self.world

    @property
    def world(self) -> int:
        return self.nodes * self.gpus

    def rendezvous_options(self, master: str) -> list[str]:
        """fairseq's options for the number of processes and the address where they meet.

        Without them, fairseq would read both from the variables of a Slurm job or of torchrun.
        """
        options = ["--distributed-world-size", str(self.world)]
        if self.nodes > 1:
            options += ["--distributed-init-method", f"tcp://{master}"]
            options += ["--distributed-rank", str(self.node * self.gpus)]
            return [*options, *(ON_CPUS if self.cpu else [])]
        if not self.cpu and self.gpus > 1:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            return [*options, "--distributed-init-method", f"tcp://localhost:{port}", "--distributed-rank", "0"]
        return options


def plan(train: Options, tokens: int, papers_gpus: int, settings: Settings) -> Machines:
    """Plan the machines of a run, and its batches.

    Args:
        train: the options of fairseq-train. --max-tokens is the largest batch.
        tokens: tokens of an update.
        papers_gpus: if this is 1, the run has one GPU unless GPUS= says otherwise.

    Raises:
        ValueError: no batch of --max-tokens or fewer divides the update.
    """
    s, cpu = settings, "--cpu" in train
    # The GPUs of a login node say nothing about the nodes where the jobs run.
    visible = [] if cpu or (s.on_cluster and not in_cluster_job()) else visible_gpus()
    cards = largest(visible, s.GPUS or (1 if papers_gpus == 1 else None))
    devices = 1 if cpu else s.GPUS or max(1, len(cards))
    workers, limit = s.nodes * devices, int(train["--max-tokens"])
    smallest = 1 if cpu else min(MIN_BATCH_TOKENS, limit)
    batches = split(tokens, workers, limit, smallest)
    if not batches:
        fitting = [count for count in range(1, devices) if split(tokens, s.nodes * count, limit, smallest)]
        advice = f"GPUS={fitting[-1]}" if fitting else "fewer NODES="
        raise ValueError(
            f"an update of {tokens} tokens does not split over {workers} devices into equal batches of "
            f"{smallest} tokens or more that fit. Give {advice}, or another batch with "
            "ARGS='--max-tokens ...'."
        )
    smaller_batch, _ = split(tokens, workers, batches[0] // 2, 1) or batches
    names = ",".join(gpu.uuid for gpu in cards) if len(cards) < len(visible) else ""
    return Machines(cpu, devices, s.nodes, s.node, *batches, smaller_batch, names)


def split(tokens: int, workers: int, limit: int, smallest: int) -> tuple[int, int] | None:
    """Split an update into the fewest equal batches of `smallest` to `limit` tokens.

    Returns:
        Tokens of a batch and batches per worker; None if no split exists.
    """
    for update_freq in range(1, tokens // (workers * smallest) + 1):
        max_tokens, rest = divmod(tokens, workers * update_freq)
        if not rest and max_tokens <= limit:
            return max_tokens, update_freq
    return None


def faults(machines: Machines, precision: str, cpu_presets: Collection[str]) -> str:
    """The reason why this environment's torch cannot train a run on this machine's GPUs; empty if it can.

    Another process tries it: once torch has used a GPU, its process holds some of the GPU's memory until it ends.

    Args:
        cpu_presets: presets that train on a CPU, for the message.
    """
    if machines.cpu:
        return ""
    command = [sys.executable, "-m", "recipes.machines", str(machines.gpus), precision]
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.returncode:
        return ""
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    reason = lines[-1] if lines else f"torch ended with status {done.returncode} on the GPUs. Look at nvidia-smi."
    on_cpu = " or ".join(f"PRESET={name}" for name in cpu_presets)
    return f"{reason}{f' Or train on a CPU with {on_cpu}.' if on_cpu else ''}"


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
        fault = f"torch {torch.__version__} runs on {works} GPUs here ({reason}), and the run needs {devices}"
        print(f"{fault}. Give GPUS=, or take another build: {BUILDS}.")
        raise SystemExit(1) from None
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        print("The GPUs here have no bf16, which comes with compute capability 8.0; take PRECISION=fp16.")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
