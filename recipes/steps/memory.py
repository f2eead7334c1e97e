"""How much memory training a Transformer takes, from its sizes.

Weights, gradients and moments; what the layers keep for the backward pass (activations.py); logits and loss; the
optimizer's step. Only the standard library is used: a plan can be printed before anything is installed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from recipes.steps.activations import Batch, Sizes, activation_bytes

GB = 1e9
CONTEXT = 1.0 * GB
"""Bytes of a GPU that no tensor gets: the CUDA context, the libraries' work space, NCCL's buffers."""
LIBRARIES = 0.035 * GB
WORD = 350
"""Bytes of a CPU's memory besides tensors: what torch, fairseq and the plugin load and cache from their import to the
first update, and two dictionaries' bytes a word."""
ONEDNN = 0.022 * GB
SMALLEST = 2**12
"""Bytes of oneDNN's code and compiled products, and the numbers of a feed-forward matrix from which on fast layers use
it where it is ahead of MKL, as on AMD's CPUs (fairseq_admin/fast/linear.py). On others that is too much."""
HEAP = 0.27
PIECES = 0.5
"""What glibc's malloc holds in freed blocks: a share of the activations; and of the logits, where the loss works
through them in pieces, each too large for the hole that the last one left. From runs of eleven sizes with glibc 2.36
(docs/results.md). Blocks of 32 MB and more leave no hole. (Without holes, by MALLOC_MMAP_THRESHOLD_=65536, an update
takes about twice as long.)"""
SPARE = 0.05
"""Share of the tensors' bytes that torch's allocator loses between blocks."""
POSITIONS = 1026
"""Rows of a table of positions: fairseq's Transformer takes up to 1,024 units, and there are two more."""
CHUNK = 2**24
CAST = 8
"""Elements that RAdam updates at once (fairseq_admin/radam.py), and the bytes an element of weight and gradient in fp32
where the optimizer keeps neither. All else its kernel does in place."""


@dataclass(frozen=True)
class Loss:
    """What a loss takes, at the peak.

    Attributes:
        logits: bytes a logit in fp32.
        activations: more bytes a logit, in an activation's.
        chunk: numbers in fp32 that are made at a time besides, on a CPU and on a GPU.
    """

    logits: int
    activations: int
    chunk: tuple[int, int]


LOSSES = {
    # The logarithms in fp32 are kept; their gradient is the sum of two, in fp32 as well.
    "plain": Loss(logits=12, activations=0, chunk=(0, 0)),
    # The logits are kept, and their gradient is written over them; two chunks of rows are there at once.
    "fast": Loss(logits=0, activations=1, chunk=(2 * 2**20, 2 * 2**26)),
}


def gigabytes(count: float) -> str:
    """For people: as many digits as matter."""
    return f"{count / GB:.{1 if count >= GB else 2}f}"


@dataclass(frozen=True)
class Need:
    """Bytes of each part, and of all at the peak."""

    static: float
    activations: float
    loss: float
    step: float
    reserve: float

    @property
    def peak(self) -> float:
        """The loss's gradient is there while all activations are; the optimizer's step follows when they are gone."""
        return self.static + max(self.activations + self.loss, self.step) + self.reserve

    def __str__(self) -> str:
        parts = {"weights, gradients, moments": self.static}
        if self.step > self.activations + self.loss:
            parts["the optimizer's step"] = self.step
        else:
            parts |= {"activations": self.activations, "logits and loss": self.loss}
        parts["reserve"] = self.reserve
        return f"{gigabytes(self.peak)} GB ({', '.join(f'{name} {gigabytes(part)}' for name, part in parts.items())})"


def loss_bytes(sizes: Sizes, tokens: float) -> float:
    """What the logits and the loss take at the peak."""
    row, logits = LOSSES[sizes.loss], tokens * sizes.words
    chunk = 4.0 * min(row.chunk[sizes.gpu], 2 * logits)
    return logits * (row.logits + row.activations * sizes.type.activation) + chunk


def cpu_reserve(sizes: Sizes, batch: Batch, activations: float) -> float:
    """What a CPU's memory holds besides tensors: code, caches, and blocks that are free and not given back."""
    onednn = sizes.layers == "fast" and sizes.width * sizes.ffn >= SMALLEST
    pieces = PIECES * 4.0 * batch.targets * sizes.words if LOSSES[sizes.loss].chunk[sizes.gpu] else 0
    return LIBRARIES + WORD * sizes.words + (ONEDNN if onednn else 0) + HEAP * activations + pieces


def need(sizes: Sizes, batch: Batch, *, accumulate: bool = False, devices: int = 1) -> Need:
    """What training takes of one device with such a batch.

    Args:
        accumulate: whether an update has several batches: the gradients of the first are there when the next comes.
        devices: how many hold the model; several exchange gradients through a second copy of them.
    """
    kind, parameters = sizes.type, sizes.parameters
    exchanged = parameters * kind.gradients if devices > 1 else 0
    positions = 4.0 * POSITIONS * sizes.width * (2 if sizes.encoder_layers else 1)
    held = parameters * (kind.weights + kind.kept) + positions + exchanged
    gradients = parameters * kind.gradients
    static = held + (gradients if accumulate else 0)
    activations = activation_bytes(sizes, batch)
    loss = loss_bytes(sizes, batch.targets)
    # The embeddings are the largest parameter; smaller ones are updated together on a GPU.
    largest = sizes.words * sizes.width
    updated = min(parameters, max(CHUNK, largest)) if sizes.gpu else largest
    step = (0 if accumulate else gradients) + (CAST * updated if sizes.precision == "me-fp16" else 0)
    if sizes.gpu:
        reserve = CONTEXT + SPARE * (static + max(activations + loss, step))
    else:
        # The embeddings' gradient, the largest, comes first, while all activations are there.
        static, step = held + gradients, 0
        reserve = cpu_reserve(sizes, batch, activations)
    return Need(static, activations, loss, step, reserve)


def most(sizes: Sizes, batches: Iterable[Batch], *, accumulate: bool = False, devices: int = 1) -> Need:
    """What training takes with the batch that takes the most."""
    found = (need(sizes, batch, accumulate=accumulate, devices=devices) for batch in batches)
    return max(found, key=lambda each: each.peak)
