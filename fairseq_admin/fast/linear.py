"""Linear layers through oneDNN, for CPUs on which MKL is slow (AMD's). The plain one is nn.Linear.

On CPUs torch multiplies float32 matrices by MKL, and has no setting that changes it: those of torch.backends.mkldnn are
for 16-bit numbers. oneDNN comes with torch too, and does not check the maker of the CPU.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .plain import Fast

CPU = Path("/proc/cpuinfo")

SMALLEST = 2**12
"""Size of the smallest weight matrix that goes through oneDNN. At 2^13 numbers MKL was as fast, at 2^10 faster."""

CACHES = {"LRU_CACHE_CAPACITY": "32", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}
"""Number of compiled products that torch and oneDNN keep, one for each combination of shapes. The default is 1,024
each, of up to 1 MB. Batches differ, so few are used again."""


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b through oneDNN. Shapes (..., K), (N, K), (N,) and (..., N)."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Product(torch.autograd.Function):  # of matrices, since the result is changed in place, which a view may not be
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_bias = gradient.sum(0) if ctx.needs_input_grad[2] else None
        return product(gradient, weight.t()), product(gradient.t(), x.t()), of_bias


class FastLinear(Fast, nn.Linear):
    """torch's linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Shapes (..., K) and (..., N)."""
        suits = self.on_cpu(x) and x.dtype == torch.float32 and self.weight.numel() >= SMALLEST
        if self.plain or not suits or torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        rows = x.reshape(-1, x.size(-1))
        return _Product.apply(rows, self.weight, self.bias).view(*x.shape[:-1], self.out_features)


def mkl_is_slow() -> bool:
    """Whether to use oneDNN: on AMD's CPUs, where it was 2.1 to 2.3 times as fast. A run that resumes decides alike."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    for name, capacity in CACHES.items():
        os.environ.setdefault(name, capacity)  # before the first product
    return CPU.exists() and "AuthenticAMD" in CPU.read_text()
