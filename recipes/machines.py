"""A run's devices, machines and precision, and how the tokens of an update are divided among them.

An update has the same number of tokens on every machine, so results are comparable.

    python -m recipes.machines 2 bf16     # if torch cannot train on two GPUs, say why and end with status 1
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipes.processes import in_cluster_job
from recipes.settings import Training

SCALED = ["--fp16-scale-window", "256", "--threshold-loss-scale", "0.03125"]
PRECISIONS = {
    "": [],
    "fp32": [],
    "fp16": ["--fp16", "--fp16-no-flatten-grads", *SCALED],
    "me-fp16": ["--memory-efficient-fp16", *SCALED],
    "amp": ["--amp"],
    "bf16": ["--bf16", "--fp16-no-flatten-grads"],
}
DEVICES = {"cpu": ["--cpu", "--num-workers", "0"], "gpu": ["--num-workers", "2", "--required-seq-len-multiple", "8"]}
ON_CPUS = ["--distributed-no-spawn", "--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp"]
SLACK = 0.05
"""Share of a card's memory that it may report less than its name says: a T4 of 16 GB has 15.8."""
MIN_BATCH_TOKENS = 1024
"""Smallest batch that an update is divided into."""
BUILDS = "make setup TORCH=cuda, or TORCH=cu126 for cards before compute capability 7.5 and older drivers"
"""How to get a torch that runs on GPUs."""


@dataclass(frozen=True)
class Gpu:
    index: str
    uuid: str
    memory: float | None
    """In GB; None for a part of a card (MIG)."""


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
        part = [Gpu(name, name, None)] if cards and name.startswith("MIG-") else []
        known = part or [gpu for gpu in cards if name and (gpu.index == name or gpu.uuid.startswith(name))]
        if len(known) != 1:
            break
        chosen += known
    return chosen


def cards_for(settings: Training, visible: list[Gpu]) -> list[Gpu]:
    """The GPUs to train on, the largest first: GPUS of them, or else all on which the model's smallest batch fits.

    So a second, small card for a display does not count. If the batch fits on no card, all count.
    """
    cards = sorted(visible, key=lambda gpu: -(gpu.memory or math.inf))
    if settings.GPUS or settings.MEMORY:
        return cards[: settings.GPUS]
    least = (1 - SLACK) * min(settings.BY_MEMORY, default=0)
    return [gpu for gpu in cards if gpu.memory is None or gpu.memory >= least] or cards


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
    """MAX_TOKENS to give if a GPU runs out of memory; 0: unknown"""
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


def device(settings: Training) -> list[str]:
    """fairseq's options for the device and the precision."""
    return [*DEVICES[settings.DEVICE], *PRECISIONS[settings.PRECISION]]


def plan(settings: Training) -> Machines:
    """Plan the machines of a run, and its batches.

    Raises:
        ValueError: no batch that fits the devices divides the update.
    """
    s, cpu = settings, settings.DEVICE == "cpu" or "--cpu" in settings.TRAIN_ARGS
    # The GPUs of a login node say nothing about the nodes where the jobs run.
    visible = [] if cpu or s.TOKENS is None or (s.WHERE == "slurm" and not in_cluster_job()) else visible_gpus()
    cards = cards_for(s, visible)
    devices = 1 if cpu else s.GPUS or max(1, len(cards))
    rank = int(os.environ.get("SLURM_NODEID", 0)) if s.NODE_RANK is None and s.NODES > 1 else s.NODE_RANK or 0
    where = (cpu, devices, s.NODES, rank)
    if s.TOKENS is None:
        if s.MAX_TOKENS is None:
            raise ValueError("MAX_TOKENS= is missing; expected the tokens of a batch.")
        return Machines(*where, s.MAX_TOKENS, s.UPDATE_FREQ)
    workers = s.NODES * devices
    memory = s.MEMORY or min((gpu.memory for gpu in cards if gpu.memory), default=None)
    # If the memory is unknown, assume that the papers' batch fits.
    known = memory is not None and s.BY_MEMORY
    limit = s.MAX_TOKENS or (largest(by_memory(s), memory or 0) if known else s.DEVICE_TOKENS)
    batches = split(s.TOKENS, workers, limit)
    if not batches:
        fitting = [count for count in range(1, devices) if split(s.TOKENS, s.NODES * count, limit)]
        advice = f"GPUS={fitting[-1]}" if fitting else "fewer NODES="
        raise ValueError(
            f"an update of {s.TOKENS} tokens does not split over {workers} devices into equal batches of "
            f"{min(MIN_BATCH_TOKENS, limit)} tokens or more that fit. Give {advice}, or another batch with MAX_TOKENS=."
        )
    smaller_batch, _ = split(s.TOKENS, workers, batches[0] // 2) or batches
    names = ",".join(gpu.uuid for gpu in cards) if len(cards) < len(visible) else ""
    return Machines(*where, *batches, smaller_batch, names)


def split(tokens: int, workers: int, limit: int) -> tuple[int, int] | None:
    """Split an update into the fewest equal batches of up to `limit` tokens.

    Returns:
        Tokens of a batch and batches per worker; None if no split exists.
    """
    for update_freq in range(1, tokens // (workers * min(MIN_BATCH_TOKENS, limit)) + 1):
        max_tokens, rest = divmod(tokens, workers * update_freq)
        if not rest and max_tokens <= limit:
            return max_tokens, update_freq
    return None


def by_memory(settings: Training) -> dict[int, int]:
    """A recipe's table {GB of a card: tokens of a batch}. With `--admin-fast graph` a token takes twice the memory."""
    table = settings.BY_MEMORY
    if "--admin-fast graph" not in " ".join(settings.TRAIN_ARGS).replace("=", " "):
        return table
    return {gb: tokens // 2 for gb, tokens in table.items()} | {2 * gb: tokens for gb, tokens in table.items()}


def largest(table: dict[int, int], memory: float) -> int:
    """Tokens of a batch on a card that reports `memory` GB, from a table {GB of a card: tokens}.

    Raises:
        ValueError: the card is smaller than all cards of the table.
    """
    if rows := [gb for gb in table if (1 - SLACK) * gb <= memory]:
        return table[max(rows)]
    smallest = min(table)
    raise ValueError(
        f"a GPU has {memory:.1f} GB, and this model was planned for {smallest} GB or more. To try it, give "
        f"MAX_TOKENS={table[smallest] // 2}."
    )


def faults(machines: Machines, precision: str, presets: Mapping[str, Mapping[str, Any]]) -> str:
    """The reason why this environment's torch cannot train a run on this machine's GPUs; empty if it can.

    Another process tries it: once torch has used a GPU, its process holds some of the GPU's memory until it ends.

    Args:
        presets: the recipe's presets. The message names the presets that train on a CPU.
    """
    if machines.cpu:
        return ""
    command = [sys.executable, "-m", "recipes.machines", str(machines.gpus), precision]
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.returncode:
        return ""
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    reason = lines[-1] if lines else f"torch ended with status {done.returncode} on the GPUs. Look at nvidia-smi."
    on_cpu = " or ".join(f"PRESET={name}" for name, values in presets.items() if values.get("DEVICE", "cpu") == "cpu")
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
