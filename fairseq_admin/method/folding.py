"""The fold's algebra on tensors: omega leaves the shortcut and enters the weights around it (Liu et al. 2020,
appendix C).

A sub-layer computes LN(ω ⊙ x + f(x)). If the module that writes x writes ω ⊙ x instead, and the modules of f that read
x divide their input by ω, the sum is the same and the shortcut needs no ω.

    the norm that wrote x       scale(weight, ω, 0), scale(bias, ω, 0)
    every module that reads x   scale(weight, 1 / ω, 1): its input columns; the bias stays

If nothing with weights wrote x (a stack's first sub-layer) and ω is one constant c > 0, then LN(c x + f) =
LN(x + f / c), except for the norm's eps: the weight and bias of the branch's last module get scale(..., 1 / c, 0).

All functions compute and return float64. C is the number of channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import AdminError

SMALLEST = 1e-6
"""Folding divides by ω. Smaller |ω| are refused, unless the caller gives another bound."""


def scale(tensor: Tensor, factor: Tensor, axis: int) -> Tensor:
    """A weight or bias with its entries along an axis `factor` times as large, float64.

    Args:
        tensor: any tensor with C entries along the axis.
        factor: shape (C,), or (1,) for all channels.
        axis: 0 scales the output of a norm or a projection, 1 the columns by which a projection reads its input.
    """
    shape = [1] * tensor.dim()
    shape[axis] = -1
    return tensor.double() * factor.to(tensor.device, torch.double).reshape(shape)


def divisible(omega: Tensor, name: str, smallest: float = SMALLEST, clamp: bool = False) -> Tensor:
    """ω in float64, if no |ω| is smaller than `smallest`. Shape (C,).

    Args:
        omega: shape (C,).
        name: the name of ω in errors.
        smallest: the smallest |ω| to divide by.
        clamp: replace smaller entries by `smallest`, with their sign, rather than refuse them.

    Raises:
        AdminError: an entry is smaller, and `clamp` is not set.
    """
    omega = omega.double()
    channel = int(omega.abs().argmin())
    if abs(omega[channel].item()) >= smallest:
        return omega
    if not clamp:
        raise AdminError(
            f"{name} is {omega[channel].item():.3g} at channel {channel}; folding divides by it. "
            f"Fold with --min-omega {smallest:g} (in Python clamp=True) to clamp it, or keep the model unfolded."
        )
    return omega.abs().clamp(min=smallest).copysign(omega)


def largest_difference(before: Tensor, after: Tensor) -> float:
    """The largest absolute difference of two outputs of one shape, or infinity if the difference is NaN anywhere."""
    apart = (before - after).abs().max().item() if before.numel() else 0.0
    return math.inf if math.isnan(apart) else apart
