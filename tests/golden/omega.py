"""The golden tables of ω, and the formulas that gave the authors' models and ours the same weights and batch.

    omega.tsv         ω of small models, without dropout.
    omega_fresh.tsv   ω of freshly initialised models, IWSLT'14's 6L-6L: mean and standard deviation over seeds.

The profiling stage of the authors' code made both. The programs that ran their code and other authors' are in this
repository's history, each with its command and the commits of that code:

    git show c2e8341:tests/golden/omega.py    and clinic.py, clinic_checkpoint.py, laws.py, rival_code.py

B batch   T time
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path

import numpy
import torch
from torch import Tensor

TABLE = Path(__file__).with_name("omega.tsv")
FRESH_TABLE = Path(__file__).with_name("omega_fresh.tsv")
CASES = {
    "3L-3L": (3, 3, 64, 128, 4),
    "6L-2L": (6, 2, 32, 64, 2),
    "18L-18L": (18, 18, 32, 64, 4),
    "2L-3L padded": (2, 3, 32, 64, 4),
}
"""The arguments of reference.sizes."""
WORDS = 100
"""Words of the dictionary next to fairseq's four special symbols."""
PAD, END = 1, 2
"""fairseq's indices of padding and of the end of a sentence."""
DROPOUTS = {"no dropout": (0.0, 0.0), "dropout": (0.3, 0.1)}
"""Dropout rates of the fresh models: after a branch; on attention weights and within the feed-forward."""
SEEDS = 40


def numbers(name: str, count: int) -> numpy.ndarray:
    """Uniform numbers in [0, 1), seeded by name. They come from raw bits, which numpy keeps stable."""
    return numpy.random.Philox(key=zlib.crc32(name.encode())).random_raw(count) / 2.0**64


def value(name: str, shape: tuple[int, ...]) -> Tensor:
    """A parameter's float32 value, from its name: Xavier-uniform matrices, norms near 1, biases near 0, padding 0."""
    centred = torch.from_numpy(2 * numbers(name, math.prod(shape)) - 1).view(shape)
    if "embed_tokens" in name:
        centred[PAD] = 0
    if len(shape) == 2:
        return (math.sqrt(6 / sum(shape)) * centred).float()
    return (float(name.endswith("norm.weight")) + 0.1 * centred).float()


def batch(padded: bool = False) -> tuple[Tensor, Tensor]:
    """Source tokens (B, T_source) and decoder input (B, T_target).

    With `padded`, sentence b is b % 4 tokens shorter: sources are padded on the left, targets on the right.
    """
    src, prev = (
        torch.from_numpy(4 + (WORDS * numbers(name, 16 * length)).astype("int64")).view(16, length)
        for name, length in (("source", 13), ("target", 11))
    )
    src[:, -1] = prev[:, 0] = END
    for b in range(len(src) if padded else 0):
        src[b, : b % 4] = PAD
        prev[b, prev.size(1) - b % 4 :] = PAD
    return src, prev
