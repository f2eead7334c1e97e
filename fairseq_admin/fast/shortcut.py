"""A sub-layer's dropout, its shortcut's ω and its norm as one node; twins: the layer's dropout and `ShortcutNorm`.

    y = LN(z),   z = ω ⊙ shortcut + dropout(branch)

The layer's dropout leaves its work to the norm behind it. Kept for the backward are z and a byte an element for the
mask; the shortcut is what the next linear layer keeps anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..method.layers import ShortcutNorm
from ..method.schemes import SUBLAYER_NORMS
from .dropout import FastDropout, keep, scaled
from .twin import Fast


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        branch: Tensor,
        shortcut: Tensor,
        omega_delta: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        omega: Tensor,
        p: float,
        eps: float,
    ) -> Tensor:
        """ω's gradient is that of its learned part. 0 <= p < 1. Under autocast the branch may be of a smaller type."""
        z, mask, ctx.scale = shortcut * omega, None, 1 / (1 - p)
        if not p:
            z += branch
        elif z.is_cpu:
            mask, ctx.scale = keep(branch, p)
            z.addcmul_(branch.to(z.dtype), mask, value=ctx.scale)
        else:
            dropped, mask = torch.native_dropout(branch, p, True)
            z += dropped
        y, mean, deviation = torch.native_layer_norm(z, weight.shape, weight, bias, eps)
        ctx.dtypes = branch.dtype, None if omega_delta is None else omega_delta.dtype
        ctx.save_for_backward(z, mask, shortcut, omega, weight, bias, mean, deviation)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        z, mask, shortcut, omega, weight, bias, mean, deviation = ctx.saved_tensors
        needed = ctx.needs_input_grad
        of_z, of_weight, of_bias = torch.ops.aten.native_layer_norm_backward(
            gradient, z, weight.shape, mean, deviation, weight, bias, (True, *needed[3:5])
        )
        of_branch = of_z if mask is None else scaled(of_z, mask, ctx.scale)
        of_delta = (of_z * shortcut).flatten(0, -2).sum(0).to(ctx.dtypes[1]) if needed[2] else None
        return of_branch.to(ctx.dtypes[0]), of_z * omega, of_delta, of_weight, of_bias, None, None, None


class LeftToTheNorm(FastDropout):
    """A layer's dropout, which the norms behind its sub-layers compute."""

    def forward(self, x: Tensor, inplace: bool = False) -> Tensor:
        """Any shape."""
        return super().forward(x, inplace) if self.plain else x


class FastShortcutNorm(Fast, ShortcutNorm):
    """LN(shortcut ⊙ ω + dropout(branch))."""

    dropout_module: FastDropout

    def forward(self, branch_and_shortcut: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        """Shapes: branch and shortcut (..., C), output (..., C)."""
        if self.plain:
            return super().forward(branch_and_shortcut)
        branch, shortcut = branch_and_shortcut
        p = self.left_dropout()
        with torch.no_grad():
            omega = self.omega.to(shortcut.dtype)
        return _Normed.apply(branch, shortcut, self.omega_delta, self.weight, self.bias, omega, p, self.eps)

    def left_dropout(self) -> float:
        """The layer's, while it drops anything."""
        dropout = self.dropout_module
        dropping = not self.plain and (dropout.training or dropout.apply_during_inference)
        return dropout.p if dropping else 0.0


def fuse_norms(layer: Any) -> None:
    """Let a layer's norms compute its dropout, too, where they know the shortcut."""
    norms = [norm for norm in (getattr(layer, name, None) for name in SUBLAYER_NORMS) if norm is not None]
    if not all(type(norm) is ShortcutNorm for norm in norms) or layer.dropout_module.p >= 1:
        return
    layer.dropout_module.__class__ = LeftToTheNorm
    for norm in norms:
        norm.__class__, norm.dropout_module = FastShortcutNorm, layer.dropout_module
