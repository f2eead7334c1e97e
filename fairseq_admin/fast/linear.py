"""Linear layers through oneDNN, for CPUs on which MKL is slow (AMD's); twin: nn.Linear.

torch multiplies float32 matrices on CPUs by MKL, and has no setting for another library: of its own settings, those of
torch.backends.mkldnn concern 16-bit numbers, and MKL_DEBUG_CPU_TYPE, once MKL's, has no effect any more. oneDNN comes
with torch, too, and makes no difference between makers.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .twin import Fast

logger = logging.getLogger(__name__)

FASTER = 1.25
"""By what oneDNN has to be ahead, so that noise does not decide."""


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a bᵀ + bias. Shapes (..., K), (N, K) and (N,)."""
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.size(-1))
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            _product(flat, weight.t()).view(x.shape) if of_x else None,
            _product(flat.t(), x.reshape(-1, x.size(-1)).t()) if of_weight else None,
            flat.sum(0) if of_bias else None,
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b, as torch's. Shapes (..., K), (N, K), (N,)."""
    if x.is_cpu and x.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu"):
        return _Linear.apply(x, weight, bias)
    return functional.linear(x, weight, bias)


class OneDnnLinear(Fast, nn.Linear):
    """torch's linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Shapes (..., K) and (..., N)."""
        return super().forward(x) if self.plain else linear(x, self.weight, self.bias)


def ahead(inputs: int, outputs: int, tokens: int = 128, rounds: int = 5) -> float:
    """How many times as fast as MKL oneDNN is in a layer of that size; 0 without oneDNN. Takes a few milliseconds."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return 0.0
    x, weight, bias = torch.ones(tokens, inputs), torch.ones(outputs, inputs), torch.ones(outputs)
    best = {functional.linear: float("inf"), _product: float("inf")}
    with torch.no_grad():
        for _ in range(rounds):
            for way in best:
                start = time.perf_counter()
                way(x, weight, bias)
                best[way] = min(best[way], time.perf_counter() - start)
    return best[functional.linear] / best[_product]
