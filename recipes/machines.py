"""What a run trains on: devices, machines, precision, and how an update's tokens are split over them.

An update holds the same number of tokens on any machine, so results compare.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

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


LEAST = 1024
"""Tokens of a batch, below which an update is not divided."""
GB = 1e9


class Batches(NamedTuple):
    max_tokens: int
    update_freq: int


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
    less: int | None
    """the batch to give where this one runs out of memory"""

    @property
    def tokens(self) -> int:
        """Of an update, at most."""
        return self.max_tokens * self.update_freq * self.world

    @property
    def world(self) -> int:
        return self.nodes * (1 if self.cpu else self.gpus)

    def meeting(self) -> list[str]:
        """Where the processes of a training meet, as fairseq's options.

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
    cpu = on_cpu(settings)
    there = [] if cpu or settings.TOKENS is None else gpus.visible()
    devices = settings.GPUS or max(1, len(there))
    if settings.NODES > 1 and devices < len(there):
        raise ValueError(
            f"GPUS={devices} of {len(there)} with NODES={settings.NODES}: fairseq trains on each GPU it sees. Let it "
            f"see only those: CUDA_VISIBLE_DEVICES={','.join(gpu.index for gpu in there[:devices])}"
        )
    node = settings.NODE
    if node is None:
        node = 0 if settings.NODES == 1 else int(os.environ.get("SLURM_NODEID", 0))
    where = (cpu, devices, settings.NODES, node, settings.MASTER)
    if settings.TOKENS is None:
        if settings.MAX_TOKENS is None:
            raise ValueError("MAX_TOKENS= is missing; expected the tokens of a batch.")
        return Machines(*where, settings.MAX_TOKENS, settings.UPDATE_FREQ, None)
    workers = settings.NODES * devices
    if settings.MAX_TOKENS is not None:
        batches = chosen(settings.TOKENS, workers, settings.MAX_TOKENS)
    else:
        memory = settings.MEMORY or min((gpu.memory / GB for gpu in there if gpu.memory), default=None)
        # Where the memory is not known, the papers' batch is taken to fit.
        known = memory is not None and settings.BY_MEMORY
        limit = largest(settings.BY_MEMORY, memory or 0) if known else settings.DEVICE_TOKENS
        batches = fewest(settings.TOKENS, workers, limit)
    less = split(settings.TOKENS, workers, batches.max_tokens // 2) or batches
    return Machines(*where, batches.max_tokens, batches.update_freq, less.max_tokens)


def split(tokens: int, workers: int, limit: int) -> Batches | None:
    """The fewest equal batches of at most `limit` tokens that make up an update; None if there are none."""
    for update_freq in range(1, tokens // (workers * min(LEAST, limit)) + 1):
        max_tokens, rest = divmod(tokens, workers * update_freq)
        if not rest and max_tokens <= limit:
            return Batches(max_tokens, update_freq)
    return None


def largest(table: dict[int, int], memory: float) -> int:
    """The tokens that a table, {GB of a card: tokens of a batch}, has for a card of so many GB.

    Raises:
        ValueError: the card is smaller than the table's smallest.
    """
    rows = [gb for gb in table if gb <= memory]
    if not rows:
        smallest = min(table)
        raise ValueError(
            f"a GPU has {memory:.1f} GB, and this model was planned for {smallest} GB or more. To try it, give "
            f"MAX_TOKENS={table[smallest] // 2}."
        )
    return table[max(rows)]


def fewest(tokens: int, workers: int, limit: int) -> Batches:
    """The largest batches of at most `limit` tokens.

    Raises:
        ValueError: no number of such batches makes up the update.
    """
    if found := split(tokens, workers, limit):
        return found
    possible = [count for count in range(1, tokens // LEAST + 1) if split(tokens, count, limit)]
    nearest = sorted(sorted(possible, key=lambda count: abs(count - workers))[:4])
    raise ValueError(
        f"an update of {tokens} tokens does not split over {workers} devices into equal batches of "
        f"{min(LEAST, limit)} tokens or more that fit. Take another number of devices (GPUS= times NODES=: "
        f"{', '.join(map(str, nearest))}), or another batch with MAX_TOKENS="
    )


def chosen(tokens: int, workers: int, max_tokens: int) -> Batches:
    """The plan for a batch that the user chose.

    Raises:
        ValueError: such batches do not make up the update.
    """
    if max_tokens < 1 or tokens % (workers * max_tokens):
        fitting = [size for size in range(LEAST, tokens // workers + 1) if tokens % (workers * size) == 0]
        nearest = sorted(sorted(fitting, key=lambda size: abs(size - max_tokens))[:4])
        raise ValueError(
            f"MAX_TOKENS={max_tokens} on {workers} devices does not make up an update of {tokens} tokens. Take "
            f"{' or '.join(map(str, nearest)) or 'fewer devices'}, or leave MAX_TOKENS out"
        )
    return Batches(max_tokens, tokens // (workers * max_tokens))


def faults(machines: Machines, precision: str) -> Iterator[str]:
    """Why this machine's GPUs, or this environment's torch, cannot train a run."""
    if machines.cpu:
        return
    there = gpus.visible()
    if len(there) < machines.gpus:
        yield (
            f"this machine has {len(there)} GPUs{gpus.restricted()}, and the run needs {machines.gpus}. Give GPUS=, or "
            "train small on a CPU with PRESET=small (or cpu)."
        )
    elif fault := gpus.torch_fault(machines.gpus, precision or "fp32", there):
        yield fault
