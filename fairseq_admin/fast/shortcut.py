"""A sub-layer's dropout, its shortcut's ω and its norm as one node; twins: the layer's dropout and `ShortcutNorm`.

    y = LN(z),   z = ω ⊙ shortcut + dropout(branch)

The layer's dropout leaves its work to the norm behind it. Kept for the backward are z and a byte an element for the
mask; the shortcut, another norm's output, is made again (again.py). What several norms need is made together: the ω of
a stack once a batch, the masks of a layer by its first norm.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..method.norms import ShortcutNorm
from ..method.schemes import SUBLAYER_NORMS
from .again import kept, remember, taken
from .dropout import FastDropout, keep, scaled
from .twin import Fast


class Shared:
    """What the norms of one stack share.

    Attributes:
        norms: those norms.
        omegas: the ω of each while the stack's forward runs; else none, and each norm adds up its own.
    """

    def __init__(self) -> None:
        self.norms: list[FastShortcutNorm] = []
        self.omegas: dict[FastShortcutNorm, Tensor] = {}
        self._zeros = self._ones = torch.empty(0)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Within this context every learned ω is there, by one operation."""
        # Under --ddp-backend fully_sharded a layer has its parameters only while it runs.
        learned = [norm for norm in self.norms if norm._parameters.get("omega_delta") is not None]
        if learned:
            first, delta = ([getattr(norm, name) for norm in learned] for name in ("omega_init", "omega_delta"))
            with torch.no_grad():
                self.omegas = dict(zip(learned, torch._foreach_add(first, delta)))
        try:
            yield
        finally:
            self.omegas = {}

    def products(self, a: Tensor, b: Tensor, mean: Tensor, weight: Tensor) -> Tensor:
        """Σ_rows a ⊙ b in one operation that makes nothing of their size. Shapes (..., C) and (C,).

        That is the gradient of a norm's weight where rows of its input have the mean 0 and the deviation 1.

        Args:
            mean: of the rows of b, any; its type and device count.
            weight: shape (C,), likewise.
        """
        rows = mean.numel()
        if rows > len(self._zeros) or (self._zeros.dtype, self._zeros.device) != (mean.dtype, mean.device):
            self._zeros, self._ones = mean.new_zeros(rows), mean.new_ones(rows)
        units, only = (self._zeros[:rows], self._ones[:rows]), (False, True, False)
        return torch.ops.aten.native_layer_norm_backward(a, b, weight.shape, *units, weight, weight, only)[1]


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        branch: Tensor,
        shortcut: Tensor,
        omega_delta: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        norm: FastShortcutNorm,
        omega: Tensor,
        p: float,
    ) -> tuple[Tensor, Tensor]:
        """y and z. ω's gradient is that of its learned part. 0 <= p < 1.

        Under autocast the branch may be of a smaller type.
        """
        z, mask, ctx.scale = shortcut * omega, None, 1 / (1 - p)
        if not p:
            z += branch
        elif z.is_cpu:
            mask, ctx.scale = norm.dropout_module.mask_of(branch, p, norm.first)
            z.addcmul_(branch.to(z.dtype), mask, value=ctx.scale)
        else:
            dropped, mask = torch.native_dropout(branch, p, True)
            z += dropped
        y, mean, deviation = torch.native_layer_norm(z, weight.shape, weight, bias, norm.eps)
        ctx.dtypes, ctx.shared = (branch.dtype, None if omega_delta is None else omega_delta.dtype), norm.shared
        ctx.maker, of_shortcut = kept(shortcut) if ctx.needs_input_grad[2] else (None, ())
        ctx.save_for_backward(z, mask, omega, weight, bias, mean, deviation, *of_shortcut)
        ctx.mark_non_differentiable(z)
        ctx.set_materialize_grads(False)  # zeros as z's
        return y, z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        z, mask, omega, weight, bias, mean, deviation, *of_shortcut = ctx.saved_tensors
        needed = ctx.needs_input_grad
        of_z, of_weight, of_bias = torch.ops.aten.native_layer_norm_backward(
            gradient, z, weight.shape, mean, deviation, weight, bias, (True, *needed[3:5])
        )
        of_branch = of_z if mask is None else scaled(of_z, mask, ctx.scale)
        of_delta = None
        if needed[2]:
            shortcut = taken(ctx.maker, tuple(of_shortcut))
            of_delta = ctx.shared.products(of_z, shortcut, mean, weight).to(ctx.dtypes[1])
        return of_branch.to(ctx.dtypes[0]), of_z * omega, of_delta, of_weight, of_bias, None, None, None


class LeftToTheNorm(FastDropout):
    """A layer's dropout, which the norms behind its sub-layers compute.

    Attributes:
        norms: how many there are.
    """

    norms: int
    _drawn: Sequence[Tensor] = ()
    _scale: float

    def forward(self, x: Tensor, inplace: bool = False) -> Tensor:
        """Any shape."""
        return super().forward(x, inplace) if self.plain else x

    def mask_of(self, branch: Tensor, p: float, first: bool) -> tuple[Tensor, float]:
        """As `keep`, on CPUs. The layer's first norm draws for the others, too: many small draws cost more than one."""
        if first or not self._drawn:
            together = branch.expand(self.norms if first else 1, *branch.shape)
            masks, self._scale = keep(together, p)
            self._drawn = masks.unbind()
        mask, *self._drawn = self._drawn
        return mask, self._scale


class FastShortcutNorm(Fast, ShortcutNorm):
    """LN(shortcut ⊙ ω + dropout(branch)).

    Attributes:
        dropout_module: the layer's.
        shared: the stack's.
        first: whether it is the first norm of its layer.
    """

    dropout_module: LeftToTheNorm
    shared: Shared
    first: bool

    def forward(self, branch_and_shortcut: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        """Shapes: branch and shortcut (..., C), output (..., C)."""
        if self.plain:
            return super().forward(branch_and_shortcut)
        branch, shortcut = branch_and_shortcut
        omega = self.shared.omegas.get(self)
        if omega is None:
            omega = self.omega.detach()
        omega = omega.to(shortcut.dtype)
        p = self.left_dropout()
        y, z = _Normed.apply(branch, shortcut, self.omega_delta, self.weight, self.bias, self, omega, p)
        remember(y, z, self.weight, self.bias, self.eps)
        return y

    def left_dropout(self) -> float:
        """The layer's, while it drops anything."""
        dropout = self.dropout_module
        dropping = not self.plain and (dropout.training or dropout.apply_during_inference)
        return dropout.p if dropping else 0.0


def fuse_norms(layer: Any, shared: Shared) -> None:
    """Let a layer's norms compute its dropout, too, where they know the shortcut."""
    norms = [norm for norm in (getattr(layer, name, None) for name in SUBLAYER_NORMS) if norm is not None]
    if not all(type(norm) is ShortcutNorm for norm in norms) or layer.dropout_module.p >= 1:
        return
    layer.dropout_module.__class__, layer.dropout_module.norms = LeftToTheNorm, len(norms)
    for norm in norms:
        norm.__class__, norm.dropout_module, norm.shared = FastShortcutNorm, layer.dropout_module, shared
        norm.first = norm is norms[0]
    shared.norms += norms
