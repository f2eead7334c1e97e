"""Linear layers through oneDNN, for CPUs on which MKL is slow (AMD's); twin: nn.Linear.

torch multiplies float32 matrices on CPUs by MKL, and has no setting for another library: of its own settings, those of
torch.backends.mkldnn concern 16-bit numbers, and MKL_DEBUG_CPU_TYPE, once MKL's, has no effect any more. oneDNN comes
with torch too, and does not ask who made the CPU.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .again import kept, made_of, matrix, taken
from .twin import Fast

logger = logging.getLogger(__name__)

FASTER = 1.5
"""By what oneDNN has to be ahead in the probe. On an AMD CPU it was 2.1 to 2.3, busy or not: noise should not decide,
so that a resumed run computes as it did before."""

SMALLEST = 2**12
"""The smallest feed-forward weight matrix of a model to use it for: of 2^13 numbers it was level, of 2^10 slower."""

CACHES = {"LRU_CACHE_CAPACITY": "32", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}
"""How many compiled products torch and oneDNN keep, one for each combination of shapes; on their own 1,024 each.
Batches differ, so few come back, and each takes up to 1 MB. A decoder layer's backward has 12, which the next layer
takes again."""


def product(onednn: bool, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b. Shapes (..., K), (N, K), (N,) and (..., N)."""
    if onednn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return functional.linear(x, weight, bias)


def product_backward(
    onednn: bool, gradient: Tensor, x: Tensor, weight: Tensor | None, needed: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, W and b from the product's. Shapes as for `product`.

    Args:
        needed: which of the three; the others are None. Without the first, W may be None.
    """
    flat = gradient.reshape(-1, gradient.size(-1))
    of_x = of_weight = of_bias = None
    if needed[0]:
        assert weight is not None
        of_x = product(onednn, flat, weight.t()).view(*gradient.shape[:-1], -1)
    if needed[1]:
        inputs = x.reshape(-1, x.size(-1))
        # oneDNN copies the first factor, of the output layer all logits again. Turned round, the result is copied.
        if onednn and flat.numel() > 2 * (inputs.numel() + flat.size(1) * inputs.size(1)):
            of_weight = product(onednn, inputs.t(), flat.t()).t().contiguous()
        else:
            of_weight = product(onednn, flat.t(), inputs.t())
    if needed[2]:
        of_bias = flat.sum(0)
    return of_x, of_weight, of_bias


def packed_product(onednn: bool, x: Tensor, parts: Sequence[Tensor | None]) -> Tensor:
    """`packed_linear` outside of autograd."""
    number = len(parts) // 2
    return product(onednn, x, _joined(parts[:number]), _joined(parts[number:]))


def packed_backward(
    onednn: bool, gradient: Tensor, x: Tensor, weights: Sequence[Tensor], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of x, of every weight and of every bias from the packed product's.

    Args:
        needed: which of them; the others may be None.
    """
    number = len(weights)
    sides = needed[0], any(needed[1 : 1 + number]), any(needed[1 + number :])
    of_x, *packed = product_backward(onednn, gradient, x, _joined(weights) if needed[0] else None, sides)
    sizes = [weight.size(0) for weight in weights]
    split = ([None] * number if it is None else it.split(sizes) for it in packed)
    return of_x, *(each for several in split for each in several)


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, onednn: bool, x: Tensor, *parts: Tensor | None) -> Tensor:
        """Weights, then biases. Of the packed ones nothing is kept."""
        ctx.onednn, ctx.number = onednn, len(parts) // 2
        ctx.maker, of_x = kept(x)
        ctx.save_for_backward(*parts[: ctx.number], *of_x)
        return packed_product(onednn, x, parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        saved = ctx.saved_tensors
        weights, x = saved[: ctx.number], taken(ctx.maker, saved[ctx.number :])
        return None, *packed_backward(ctx.onednn, gradient, x, weights, ctx.needs_input_grad[1:])


def _joined(parts: Any) -> Any:
    """The parts behind each other, outside of autograd; copied only where `put_together` has not been at them."""
    first = parts[0]
    if len(parts) == 1 or first is None:
        return first
    place, rows = first.data_ptr(), 0
    for part in parts:
        if part.data_ptr() != place:
            return torch.cat(parts)
        place, rows = place + part.nbytes, rows + part.size(0)
    storage = first.untyped_storage()
    if place > storage.data_ptr() + storage.nbytes():  # neighbours by chance
        return torch.cat(parts)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def put_together(parts: list[nn.Parameter]) -> None:
    """Give parameters that are packed one storage, in which each follows the one before it."""
    with torch.no_grad():
        joined = _joined(parts)
        for part, its in zip(parts, joined.split([len(part) for part in parts])):
            part.data = its


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
        sides: Any = parts[:number], parts[number:]
        return functional.linear(x, *(torch.cat(side) if number > 1 else side[0] for side in sides))
    onednn = onednn and x.is_cpu and x.dtype == torch.float32
    if len(parts) == 2 and not (onednn or made_of(x)):
        return functional.linear(x, *parts)  # type: ignore[arg-type]
    return _Packed.apply(onednn, x, *parts)


class FastLinear(Fast, nn.Linear):
    """torch's linear layer, which keeps no input that can be made again."""

    onednn: bool = False
    """Whether it goes through oneDNN."""

    def forward(self, x: Tensor) -> Tensor:
        """Shapes (..., K) and (..., N)."""
        if self.plain or not (self.onednn or made_of(x)):
            return super().forward(x)
        # Not what the node itself gives: that is a view, and fairseq's attention changes its queries in place.
        return packed_linear(self.onednn, matrix(x), self.weight, self.bias).unflatten(0, x.shape[:-1])


def bound_caches() -> None:
    """Keep fewer compiled products, unless the environment says how many. To be called before the first product."""
    for name, capacity in CACHES.items():
        os.environ.setdefault(name, capacity)


def ahead(size: int = 512, rounds: int = 5) -> float:
    """How many times as fast as MKL oneDNN is on this CPU; 0 without oneDNN. Takes some milliseconds.

    By one thread: of several, this one's time has its waiting for the others in it, and other processes decide that.
    """
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return 0.0
    bound_caches()
    x, weight, bias = torch.ones(size, size), torch.ones(size, size), torch.ones(size)
    best = {False: float("inf"), True: float("inf")}
    with torch.no_grad(), _one_thread():
        for _ in range(rounds):
            for onednn in best:
                start = time.thread_time()  # which other processes do not lengthen
                product(onednn, x, weight, bias)
                best[onednn] = min(best[onednn], time.thread_time() - start)
    return best[False] / best[True]


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
