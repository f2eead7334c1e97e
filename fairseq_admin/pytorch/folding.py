"""The fold's algebra on tensors: omega leaves the shortcut and enters the weights around it (Liu et al. 2020,
appendix C).

A sub-layer computes LN(ω ⊙ x + f(x)). Let whatever writes x write ω ⊙ x, and let whatever in f reads x divide its input
by ω: the sum is the same, and the shortcut needs no ω.

    the norm that wrote x       scale(weight, ω, 0), scale(bias, ω, 0)
    every module that reads x   scale(weight, 1 / ω, 1): its input columns; the bias stays

Where nothing with weights wrote x (a stack's first sub-layer) and ω is one constant c > 0, LN(c x + f) = LN(x + f / c)
but for the norm's eps: the weight and bias of the branch's last module get scale(..., 1 / c, 0).

Everything is computed and returned in float64. C channels
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..errors import AdminError

SMALLEST = 1e-6
"""Folding divides by ω; entries nearer to 0 than this are refused, unless another bound is given."""
CLAMP = "Fold with --min-omega {:g} (in Python clamp=True) to clamp it, or keep the model unfolded"


def scale(tensor: Tensor, factor: Tensor, axis: int) -> Tensor:
    """A weight or a bias whose entries along an axis are `factor` times as large.

    Args:
        tensor: any with C entries along the axis.
        factor: shape (C,), or (1,) for all channels.
        axis: 0 for what a norm or a projection gives, 1 for the columns of a projection, by which it reads.
    """
    shape = [1] * tensor.dim()
    shape[axis] = -1
    return tensor.double() * factor.to(tensor.device, torch.double).reshape(shape)


def whole(tensor: Any) -> Any:
    """All of a tensor of which FSDP has a shard on each rank: every rank has to call. Any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def divisible(omega: Tensor, name: str, smallest: float = SMALLEST, clamp: bool = False, advice: str = CLAMP) -> Tensor:
    """ω, float64, without an entry nearer to 0 than `smallest`. Shape (C,).

    Args:
        omega: shape (C,).
        name: what errors call it.
        smallest: the smallest |ω| to divide by.
        clamp: take `smallest` for entries nearer to 0, each with its sign, rather than refuse them.
        advice: what errors say can be done.

    Raises:
        AdminError: there is such an entry, and it is not to be clamped.
    """
    omega = omega.double()
    channel = int(omega.abs().argmin())
    if abs(omega[channel].item()) >= smallest:
        return omega
    if not clamp:
        raise AdminError(
            f"{name} is {omega[channel].item():.3g} at channel {channel}; folding divides by it. "
            f"{advice.format(smallest)}."
        )
    return omega.abs().clamp(min=smallest).copysign(omega)


def largest_difference(before: Tensor, after: Tensor) -> float:
    """The largest absolute difference of two outputs of one shape; infinity if either is not a number somewhere."""
    apart = (before - after).abs().max().item() if before.numel() else 0.0
    return math.inf if math.isnan(apart) else apart
