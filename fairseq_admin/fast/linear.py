"""Linear layers through oneDNN, for CPUs on which MKL is slow (AMD's); twin: nn.Linear.

torch multiplies float32 matrices on CPUs by MKL, and has no setting for another library: of its own settings, those of
torch.backends.mkldnn concern 16-bit numbers, and MKL_DEBUG_CPU_TYPE, once MKL's, has no effect any more. oneDNN comes
with torch too, and does not ask who made the CPU.
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


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, onednn: bool, x: Tensor, *parts: Tensor | None) -> Tensor:
        """Weights, then biases. Of the packed ones nothing is kept."""
        product = ctx.product = _product if onednn else functional.linear
        number = ctx.number = len(parts) // 2
        ctx.save_for_backward(x, *parts[:number])
        return product(x, _joined(parts[:number]), _joined(parts[number:]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        sizes = [weight.size(0) for weight in weights]
        flat = gradient.reshape(-1, gradient.size(-1))
        needed = ctx.needs_input_grad
        of_x, of_weights, of_biases = None, [None] * ctx.number, [None] * ctx.number
        if needed[1]:
            of_x = ctx.product(flat, _joined(weights).t()).view(x.shape)
        if any(needed[2 : 2 + ctx.number]):
            of_weights = ctx.product(flat.t(), x.reshape(-1, x.size(-1)).t()).split(sizes)
        if any(needed[2 + ctx.number :]):
            of_biases = flat.sum(0).split(sizes)
        return None, of_x, *of_weights, *of_biases


def _joined(parts: Any) -> Any:
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def packed_linear(onednn: bool, x: Tensor, *parts: Tensor | None) -> Tensor:
    """Several linear layers of one input as one, [x W_1ᵀ + b_1, x W_2ᵀ + b_2, ...].

    Args:
        onednn: whether through oneDNN, where it can.
        x: shape (..., K).
        parts: all weights, of shapes (N_i, K), then as many biases, (N_i,); all None only for one layer.

    Returns:
        Shape (..., Σ N_i).
    """
    if torch.is_autocast_enabled(x.device.type):
        # Which casts what it is given, and keeps the weights that it has cast for their next use.
        number = len(parts) // 2
        return functional.linear(x, _joined(parts[:number]), _joined(parts[number:]))
    onednn = onednn and x.is_cpu and x.dtype == torch.float32
    if len(parts) == 2 and not onednn:
        return functional.linear(x, *parts)  # type: ignore[arg-type]
    return _Packed.apply(onednn, x, *parts)


class OneDnnLinear(Fast, nn.Linear):
    """torch's linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Shapes (..., K) and (..., N)."""
        return super().forward(x) if self.plain else packed_linear(True, x, self.weight, self.bias)


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
