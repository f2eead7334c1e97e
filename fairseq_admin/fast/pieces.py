"""Pieces of a layer, each with a backward of its own: a node of its own, or with others one.

A sub-layer's piece is not computed where it stands, if what follows it can take it in: `Branch` goes on in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules.module import _has_any_global_hook

Tensors = Sequence[Any]
"""Tensors, or None in their place."""


class Piece:
    """One computation of one batch; it holds what its backward needs, except for tensors."""

    def forward(self, *given: Any) -> tuple[Tensor, Tensors]:
        """Its output, and the tensors that its backward needs."""
        raise NotImplementedError

    def backward(self, gradient: Tensor, saved: Tensors, needed: Sequence[bool]) -> Tensors:
        """Gradients of what was given, where they are needed; the first is no other tensor's."""
        raise NotImplementedError


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: Piece, *given: Any) -> Tensor:
        ctx.piece = piece
        y, saved = piece.forward(*given)
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, *ctx.piece.backward(gradient, ctx.saved_tensors, ctx.needs_input_grad[1:])


class Branch(NamedTuple):
    """A sub-layer's branch that is still to be computed: a piece and what it is given, the sub-layer's input first."""

    piece: Piece
    given: Tensors

    def computed(self) -> Tensor:
        """As a node of its own."""
        return _Node.apply(self.piece, *self.given)


def able(x: Tensor) -> bool:
    """Whether pieces of more than one layer can take an input."""
    return x.is_cpu and x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where torch keeps a module's."""


def unobserved(*modules: Any) -> bool:
    """Whether modules can pass a `Branch` on: none gives way to its twin, and no hook would see it."""
    hooked = (vars(module)[name] for module in modules for name in HOOKS)
    return not (_has_any_global_hook() or any(module.plain for module in modules) or any(hooked))


class Ends:
    """A module that can give a `Branch`, the last of its sub-layer.

    Attributes:
        followed_by: its layer, the modules behind it that pass it on, and the norm that takes it in.
    """

    followed_by: tuple[Any, ...] = ()

    def given_on(self, branch: Branch) -> Any:
        """The branch itself, if that is taken in, else its output."""
        if self.followed_by:
            layer, *modules = self.followed_by
            # Whoever calls a module of a layer by itself wants its output. What measures a run stands in a layer.
            if modules[-1].shared.running and unobserved(self, *modules) and "residual_connection" not in vars(layer):
                return branch
        return branch.computed()


def cut(flat: Sequence[Any], numbers: Sequence[int]) -> Iterator[list[Any]]:
    """Lists of so many each, and the rest."""
    left = iter(flat)
    for number in numbers:
        yield list(islice(left, number))
    yield list(left)
