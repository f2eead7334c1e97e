"""A feed-forward layer's activation and dropout as one node; twin: the two that fairseq's layers call in turn.

relu keeps for its backward what the next linear layer keeps anyway, the output: y > 0 where x > 0 and was not dropped.
gelu keeps x and a byte an element for the mask.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from fairseq.modules import gelu, gelu_accurate
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .dropout import FastDropout, dropout, keep, scaled


class _ReluDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        y = functional.relu(x)
        if y.is_cpu:
            mask, ctx.scale = keep(y, p)
            scaled(y, mask, ctx.scale, out=y)
        else:
            ctx.scale = 1 / (1 - p)
            functional.dropout(y, p, inplace=True)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(gradient, y, 0).mul_(ctx.scale), None


class _GeluDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, approximate: str) -> Tensor:
        ctx.approximate = approximate
        y = functional.gelu(x, approximate=approximate)
        if x.is_cpu:
            mask, ctx.scale = keep(x, p)
            scaled(y, mask, ctx.scale, out=y)
        else:
            ctx.scale = 1 / (1 - p)
            y, mask = torch.native_dropout(y, p, True)
        ctx.save_for_backward(x, mask)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, mask = ctx.saved_tensors
        gradient = scaled(gradient, mask, ctx.scale)
        return torch.ops.aten.gelu_backward(gradient, x, approximate=ctx.approximate), None, None


def _relu(x: Tensor, p: float) -> Tensor:
    return _ReluDropout.apply(x, p) if 0 < p < 1 else dropout(functional.relu(x), p)


def _gelu(x: Tensor, p: float) -> Tensor:
    return _GeluDropout.apply(x, p, "none") if 0 < p < 1 else dropout(functional.gelu(x), p)


def _gelu_accurate(x: Tensor, p: float) -> Tensor:
    if 0 < p < 1:
        return _GeluDropout.apply(x, p, "tanh")
    return dropout(functional.gelu(x, approximate="tanh"), p)


FUSED: dict[Callable, Callable[[Tensor, float], Tensor]] = {
    functional.relu: _relu,
    gelu: _gelu,
    gelu_accurate: _gelu_accurate,
}
"""From the activations of fairseq that have one node with dropout to that node."""


def passed_on(x: Tensor) -> Tensor:
    """What stands for a layer's activation, which its dropout module then computes."""
    return x


class ActivationDropout(FastDropout):
    """A layer's activation, then its dropout."""

    activation: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor, inplace: bool = False) -> Tensor:
        """Any shape."""
        if self.plain:
            return super().forward(self.activation(x), inplace)
        return FUSED[self.activation](x, self.p if self.training or self.apply_during_inference else 0.0)


def fuse(layer: Any) -> bool:
    """Let one node compute a layer's activation and dropout. Returns whether there is one for its activation."""
    if layer.activation_fn not in FUSED:
        return False
    module = layer.activation_dropout_module
    module.__class__ = ActivationDropout
    module.activation, layer.activation_fn = layer.activation_fn, passed_on
    return True
