"""Dropout with fewer random bits on CPUs. The plain one is fairseq's, which is torch's.

On CPUs torch draws a 32-bit number for every element, and keeps the mask in the elements' type. Here an element takes
16 bits, and its mask one byte. So the probability is the multiple of 2⁻¹⁶ closest to p, and the elements that stay are
scaled by that probability, which keeps the mean. On other devices this is torch's operation.
"""

from __future__ import annotations

from typing import Any

import torch
from fairseq.modules import FairseqDropout
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .plain import Fast

LEVELS = 2**16
ZERO = torch.zeros(())


def keep(x: Tensor, p: float) -> tuple[Tensor, float]:
    """The mask of the elements that stay (1 or 0, int8), and the factor that scales them. 0 < p < 1."""
    dropped = min(max(round(p * LEVELS), 1), LEVELS - 1)
    # Each 64 bits are four numbers.
    bits = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    # torch has vector code for int8 here and in products, but not for bool.
    mask = torch.ge(bits[: x.numel()], dropped - LEVELS // 2, out=torch.empty(x.numel(), dtype=torch.int8))
    return mask.view(x.shape), LEVELS / (LEVELS - dropped)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        mask, ctx.scale = keep(x, p)
        ctx.save_for_backward(mask)
        return torch.addcmul(ZERO, x, mask, value=ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.addcmul(ZERO, gradient, ctx.saved_tensors[0], value=ctx.scale), None


def dropout(x: Tensor, p: float) -> Tensor:
    """For CPUs: elements are 0 with probability p, else scaled so that the mean stays. Any shape."""
    if not p:
        return x
    return _Dropout.apply(x, p) if p < 1 else functional.dropout(x, p)


class FastDropout(Fast, FairseqDropout):
    """fairseq's dropout."""

    def forward(self, x: Tensor, inplace: bool = False) -> Tensor:
        """Any shape."""
        if self.plain or inplace:
            return super().forward(x, inplace)
        p = self.p if self.training or self.apply_during_inference else 0.0
        return dropout(x, p) if self.on_cpu(x) else functional.dropout(x, p) if p else x
