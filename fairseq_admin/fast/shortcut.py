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
from .again import kept, remember, stays, taken
from .dropout import FastDropout, keep, scaled
from .pieces import Branch, Piece, Tensors
from .twin import Fast

BETWEEN = ("return_fc", "c_attn", "attn_ln", "w_resid")
"""Attributes of fairseq's layers by which something else takes a branch."""


class Shared:
    """What the norms of one stack share.

    Attributes:
        norms: those norms.
        running: whether the stack's forward runs.
        omegas: the ω of each while it does; else none, and each norm adds up its own.
    """

    running = False

    def __init__(self) -> None:
        self.norms: list[FastShortcutNorm] = []
        self.omegas: dict[FastShortcutNorm, Tensor] = {}
        self._zeros = self._ones = torch.empty(0)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Within this context, the stack's forward, every learned ω is there, by one operation."""
        # Under --ddp-backend fully_sharded a layer has its parameters only while it runs.
        learned = [norm for norm in self.norms if stays(norm._parameters.get("omega_delta"))]
        if learned:
            first, delta = ([getattr(norm, name) for norm in learned] for name in ("omega_init", "omega_delta"))
            with torch.no_grad():
                self.omegas = dict(zip(learned, torch._foreach_add(first, delta)))
        self.running = True
        try:
            yield
        finally:
            self.running, self.omegas = False, {}

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
        units = [these[:rows].view(mean.shape) for these in (self._zeros, self._ones)]
        only = (False, True, False)
        return torch.ops.aten.native_layer_norm_backward(a, b, weight.shape, *units, weight, weight, only)[1]


class _Computed(Piece):
    """A branch that is there."""

    def forward(self, shortcut: Tensor, branch: Tensor) -> tuple[Tensor, Tensors]:
        return branch, ()

    def backward(self, gradient: Tensor, saved: Tensors, needed: Sequence[bool]) -> Tensors:
        return None, gradient


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        norm: FastShortcutNorm,
        omega: Tensor,
        p: float,
        piece: Piece,
        omega_delta: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        shortcut: Tensor,
        *given: Any,
    ) -> tuple[Tensor, Tensor]:
        """y and z. ω's gradient is that of its learned part. 0 <= p < 1.

        Under autocast branch and shortcut may be of a smaller type than the weights, and z is of theirs.
        """
        branch, saved = piece.forward(shortcut, *given)
        z, mask, ctx.scale = shortcut.to(weight.dtype) * omega, None, 1 / (1 - p)
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
        ctx.maker, of_shortcut = kept(shortcut) if ctx.needs_input_grad[4] else (None, ())
        ctx.piece, ctx.number = piece, len(of_shortcut)
        ctx.save_for_backward(z, mask, omega, weight, bias, mean, deviation, *of_shortcut, *saved)
        ctx.mark_non_differentiable(z)
        ctx.set_materialize_grads(False)  # zeros as z's
        return y, z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        z, mask, omega, weight, bias, mean, deviation, *rest = ctx.saved_tensors
        _, _, _, _, needs_delta, needs_weight, needs_bias, *needed = ctx.needs_input_grad
        of_z, of_weight, of_bias = torch.ops.aten.native_layer_norm_backward(
            gradient, z, weight.shape, mean, deviation, weight, bias, (True, needs_weight, needs_bias)
        )
        of_branch = of_z if mask is None else scaled(of_z, mask, ctx.scale)
        of_delta = None
        if needs_delta:
            shortcut = taken(ctx.maker, tuple(rest[: ctx.number])).to(z.dtype)
            of_delta = ctx.shared.products(of_z, shortcut, mean, weight).to(ctx.dtypes[1])
        of_x, *of_given = ctx.piece.backward(of_branch.to(ctx.dtypes[0]), rest[ctx.number :], needed)
        # Rounded as by autograd, which adds what two nodes give: a run is the same whichever way it takes.
        of_shortcut = of_z * omega
        of_x = of_shortcut if of_x is None else of_x.add_(of_shortcut)
        return None, None, None, None, of_delta, of_weight, of_bias, of_x, *of_given


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
        piece, given = _Computed(), [branch]
        if isinstance(branch, Branch):
            piece, given = branch.piece, branch.given[1:]
            assert branch.given[0] is shortcut
        omega = self.shared.omegas.get(self)
        if omega is None:
            omega = self.omega.detach()
        omega = omega.to(self.weight.dtype)
        p = self.left_dropout()
        y, z = _Normed.apply(self, omega, p, piece, self.omega_delta, self.weight, self.bias, shortcut, *given)
        remember(y, z, self.weight, self.bias, self.eps)
        return y

    def left_dropout(self) -> float:
        """The layer's, while it drops anything."""
        dropout = self.dropout_module
        dropping = not self.plain and (dropout.training or dropout.apply_during_inference)
        return dropout.p if dropping else 0.0


def fuse_norms(layer: Any, shared: Shared) -> None:
    """Let a layer's norms compute its dropout, too, and its branches, where they know the shortcut."""
    norms = {name: norm for name in SUBLAYER_NORMS if (norm := getattr(layer, name, None)) is not None}
    if not all(type(norm) is ShortcutNorm for norm in norms.values()) or layer.dropout_module.p >= 1:
        return
    dropout, first = layer.dropout_module, next(iter(norms.values()))
    dropout.__class__, dropout.norms = LeftToTheNorm, len(norms)
    for name, norm in norms.items():
        norm.__class__, norm.dropout_module, norm.shared = FastShortcutNorm, dropout, shared
        norm.first = norm is first
        ends = layer.fc2 if norm is layer.final_layer_norm else getattr(layer, name[: -len("_layer_norm")])
        # fairseq hands on the feed-forward branch itself, or scales heads, norms or scales shortcuts in between.
        if not any(getattr(layer, each, None) for each in BETWEEN):
            ends.followed_by = layer, dropout, norm
    shared.norms += norms.values()
