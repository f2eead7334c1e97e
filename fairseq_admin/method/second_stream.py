"""ResiDual's second stream d, next to Post-LN's x: the sum of a stack's input and all its branches.

    x_{k+1} = LN(x_k + f(x_k)),   d_{k+1} = d_k + f(x_k),   d_0 = x_0,   output x_S + LN(d_S)

Xie et al. 2023, from the authors' code (microsoft/ResiDual), with its scale factors equal to 1. Layers pass both
streams on as one tensor of 2C channels, x first. So activation checkpointing, layerdrop and fairseq's stacks carry
both, with their gradients. The hidden states that a stack returns on request are such pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .schemes import change_first


def unpack(states: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Split a layer's input into x and d.

    Args:
        states: shape (T, B, 2C); or (T, B, C), a stack's input, which is both x and d.
        channels: C.

    Returns:
        x and d. Shapes (T, B, C).
    """
    return (states, states) if states.size(-1) == channels else states.split(channels, -1)  # type: ignore[return-value]


def pack(output: Any, d: Tensor) -> Any:
    """Join x and d.

    Args:
        output: a layer's output: x, or a tuple that begins with x. Shape (T, B, C).
        d: shape (T, B, C).

    Returns:
        The output with [x, d] in place of x. Shape (T, B, 2C).
    """
    return change_first(output, lambda x: torch.cat((x, d), -1))


class SecondNorm(nn.LayerNorm):
    """x + LN(d), the end of a stack.

    Args:
        channels: C.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-7)  # as in the authors' code

    def forward(self, states: Tensor) -> Tensor:
        """Join both streams.

        Args:
            states: x and d. Shape (T, B, 2C).

        Returns:
            Shape (T, B, C).
        """
        x, d = unpack(states, self.normalized_shape[0])
        return x + super().forward(d)
