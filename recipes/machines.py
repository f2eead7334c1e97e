"""Devices, machines and precision of a run, and how an update's tokens are split over them.

An update has the same number of tokens on any machine, so results compare.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipes.jobs import in_cluster_job
from recipes.settings import Training
from recipes.steps import gpus

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


MIN_BATCH_TOKENS = 1024
"""An update is not divided into smaller batches."""
GB = 1e9


@dataclass(frozen=True)
class Machines:
    cpu: bool
    gpus: int
    """of a machine"""
    nodes: int
    node: int
    master: str
    max_tokens: int
    update_freq: int
    smaller_batch: int | None
    """the batch to give where this one runs out of memory"""

    def __str__(self) -> str:
        devices = "the CPU" if self.cpu else f"{self.gpus} GPUs"
        batches = f"{self.update_freq} batches of up to {self.max_tokens} tokens"
        return f"An update of {self.tokens} tokens: {self.nodes} nodes x {devices} x {batches}."

    @property
    def tokens(self) -> int:
        """Tokens of an update, at most."""
        return self.max_tokens * self.update_freq * self.world

    @property
    def world(self) -> int:
        return self.nodes * (1 if self.cpu else self.gpus)

    def rendezvous_options(self) -> list[str]:
        """fairseq's options that tell the processes of a training where to meet.

        fairseq would take a place to meet, and a number of processes, from the variables of a SLURM job or torchrun.
        """
        options = ["--distributed-world-size", str(self.world)]
        if self.nodes > 1:
            options += ["--distributed-init-method", f"tcp://{self.master}"]
            options += ["--distributed-rank", str(self.node * self.gpus)]
            return [*options, *(ON_CPUS if self.cpu else [])]
        if not self.cpu and self.gpus > 1:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            return [*options, "--distributed-init-method", f"tcp://localhost:{port}", "--distributed-rank", "0"]
        return options


def on_cpu(settings: Training) -> bool:
    return settings.DEVICE == "cpu" or "--cpu" in settings.TRAIN_ARGS


def device(settings: Training) -> list[str]:
    """fairseq's options for the device and the precision."""
    return [*DEVICES[settings.DEVICE], *PRECISIONS[settings.PRECISION]]


def plan(settings: Training) -> Machines:
    """The machines of a run, and its batches.

    Raises:
        ValueError: such batches do not make up an update, or fit no device.
    """
    cpu, s = on_cpu(settings), settings
    # A login node has other GPUs than the nodes where the jobs run.
    visible = [] if cpu or s.TOKENS is None or (s.WHERE == "slurm" and not in_cluster_job()) else gpus.visible()
    devices = 1 if cpu else s.GPUS or max(1, len(visible))
    if s.NODES > 1 and devices < len(visible):
        raise ValueError(
            f"GPUS={devices} of {len(visible)} with NODES={s.NODES}: fairseq trains on each GPU it sees. Let it "
            f"see only those: CUDA_VISIBLE_DEVICES={','.join(gpu.index for gpu in visible[:devices])}"
        )
    rank = int(os.environ.get("SLURM_NODEID", 0)) if s.NODE_RANK is None and s.NODES > 1 else s.NODE_RANK or 0
    where = (cpu, devices, s.NODES, rank, s.MASTER)
    if s.TOKENS is None:
        if s.MAX_TOKENS is None:
            raise ValueError("MAX_TOKENS= is missing; expected the tokens of a batch.")
        return Machines(*where, s.MAX_TOKENS, s.UPDATE_FREQ, None)
    workers = s.NODES * devices
    memory = s.MEMORY or min((gpu.memory / GB for gpu in visible if gpu.memory), default=None)
    # Where the memory is not known, the papers' batch is taken to fit.
    known = memory is not None and s.BY_MEMORY
    limit = s.MAX_TOKENS or (largest(s.BY_MEMORY, memory or 0) if known else s.DEVICE_TOKENS)
    batches = split(s.TOKENS, workers, limit)
    if not batches:
        fitting = [count for count in range(1, devices) if split(s.TOKENS, s.NODES * count, limit)]
        advice = f"GPUS={fitting[-1]}" if fitting else "fewer NODES="
        raise ValueError(
            f"an update of {s.TOKENS} tokens does not split over {workers} devices into equal batches of "
            f"{min(MIN_BATCH_TOKENS, limit)} tokens or more that fit. Give {advice}, or another batch with MAX_TOKENS=."
        )
    smaller_batch, _ = split(s.TOKENS, workers, batches[0] // 2) or batches
    return Machines(*where, *batches, smaller_batch)


def split(tokens: int, workers: int, limit: int) -> tuple[int, int] | None:
    """Split an update into the fewest equal batches of at most `limit` tokens.

    Returns:
        Tokens of a batch and batches per worker; None if there is no such split.
    """
    for update_freq in range(1, tokens // (workers * min(MIN_BATCH_TOKENS, limit)) + 1):
        max_tokens, rest = divmod(tokens, workers * update_freq)
        if not rest and max_tokens <= limit:
            return max_tokens, update_freq
    return None


def largest(table: dict[int, int], memory: float) -> int:
    """Tokens of a batch for a card of `memory` GB, by a table {GB of a card: tokens}.

    Raises:
        ValueError: the card is smaller than the table's smallest.
    """
    if rows := [gb for gb in table if gb <= memory]:
        return table[max(rows)]
    smallest = min(table)
    raise ValueError(
        f"a GPU has {memory:.1f} GB, and this model was planned for {smallest} GB or more. To try it, give "
        f"MAX_TOKENS={table[smallest] // 2}."
    )


def faults(machines: Machines, precision: str, presets: Mapping[str, Mapping[str, Any]]) -> str:
    """Why this machine's GPUs, or this environment's torch, cannot train a run; empty if they can.

    Args:
        presets: the recipe's; those for a CPU are named.
    """
    if machines.cpu:
        return ""
    if (count := len(gpus.visible())) < machines.gpus:
        variable = os.environ.get("CUDA_VISIBLE_DEVICES")
        on_cpu = " or ".join(
            f"PRESET={name}" for name, values in presets.items() if values.get("DEVICE", "cpu") == "cpu"
        )
        return (
            f"this machine has {count} GPUs{'' if variable is None else f' (CUDA_VISIBLE_DEVICES={variable})'}, and "
            f"the run needs {machines.gpus}. Give GPUS={f', or train on a CPU with {on_cpu}' if on_cpu else ''}."
        )
    return gpus.fault(machines.gpus, precision)
