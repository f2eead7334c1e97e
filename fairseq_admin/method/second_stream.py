"""ResiDual's second stream: next to Post-LN's x, the sum d of a stack's input and of all its branches.

    x_{k+1} = LN(x_k + f(x_k)),   d_{k+1} = d_k + f(x_k),   d_0 = x_0,   output x_S + LN(d_S)

Xie et al. 2023, from the authors' code (microsoft/ResiDual, its scales of 1). From layer to layer both go as one
tensor of 2C channels, x first, so whatever passes a layer's output on (activation checkpointing, layerdrop, fairseq's
stacks) passes on both, with their gradients. The hidden states that a stack returns on request are such pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def unpack(states: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """x and d of shape (T, B, C): the input of a stack is both."""
    return (states, states) if states.size(-1) == channels else states.split(channels, -1)  # type: ignore[return-value]


def pack(output: Any, d: Tensor) -> Any:
    """A layer's output, of which the first entry may be x, with d next to x. Shape (T, B, 2C)."""
    if isinstance(output, tuple):
        return torch.cat((output[0], d), -1), *output[1:]
    return torch.cat((output, d), -1)


class SecondNorm(nn.LayerNorm):
    """x + LN(d), which ends a stack."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-7)  # the authors'

    def forward(self, states: Tensor) -> Tensor:
        """Shapes (T, B, 2C) and (T, B, C)."""
        x, d = unpack(states, self.normalized_shape[0])
        return x + super().forward(d)
