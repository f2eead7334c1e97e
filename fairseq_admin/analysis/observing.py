"""The sub-layers of an encoder or a decoder as they run: branch, shortcut and output of each, in forward order.

Every layer of ours and of fairseq's adds its branch to its shortcut in `residual_connection`. While a stack is
observed, each of its layers has a method of that name of its own, which notes what it is given and calls the layer's.
So every scheme can be observed, and the model itself stays as it is.

    T time   B batch   C channels   S sub-layers   R real positions
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..method.norms import BottomNorm, ShortcutNorm
from ..method.schemes import SUBLAYER_NORMS, layers_of

KINDS = {"self_attn": "self-attention", "encoder_attn": "encoder-attention", "ffn": "feed-forward"}
"""The kinds of sub-layer, as state_dict.omegas names them, and in words."""


@dataclass
class Sublayer:
    """One sub-layer in one forward pass: output = norm(a · shortcut + b · branch + bottom), or without the norm."""

    layer: int
    """The number of its layer in the stack, from 0."""
    kind: str
    """A key of KINDS."""
    branch: Tensor
    """f, before it is scaled. Shape (T, B, C)."""
    shortcut: Tensor
    """x, before it is scaled. Shape (T, B, C)."""
    a: Tensor | float
    """What multiplies the shortcut: ω, of shape (C,), or one number."""
    b: Tensor | float
    """What multiplies the branch: one number."""
    norm: nn.LayerNorm | None
    """The norm of the sum; None: the sum is the output."""
    bottom: Tensor | None
    """What is added too: the input of the layer, in the last sub-layer of a B2T layer. Shape (T, B, C)."""
    output: Tensor
    """Shape (T, B, C)."""

    @property
    def name(self) -> str:
        return f"layers.{self.layer}.{self.kind}"

    @property
    def total(self) -> Tensor:
        """What is normalised, or is the output. Shape (T, B, C)."""
        total = self.a * self.shortcut + self.b * self.branch
        return total if self.bottom is None else total + self.bottom


def _scales(layer: Any, norm: nn.Module) -> tuple[Tensor | float, Tensor | float]:
    """a and b of a layer's sub-layer."""
    if isinstance(norm, ShortcutNorm):
        return norm.omega.detach(), 1.0
    shortcut, branch = getattr(layer, "shortcut_scale", None), getattr(layer, "branch_scale", None)
    return 1.0 if shortcut is None else shortcut, 1.0 if branch is None else branch.detach()


@contextlib.contextmanager
def observed(stack: Any, given: Sequence[Tensor] | None = None) -> Iterator[list[Sublayer]]:
    """In this block, every forward of the stack appends its sub-layers to the list that it is entered with.

    Args:
        stack: an encoder or a decoder of plain layers (--admin-fast off).
        given: branches that take the place of the sub-layers' own, which are noted all the same; S of them. Then every
            sub-layer has the input that it has in the model which these branches are from.
    """
    seen: list[Sublayer] = []
    with contextlib.ExitStack() as undo:
        for number, layer in enumerate(layers_of(stack)):
            _observe(layer, number, seen, given, undo)
        yield seen


def _observe(
    layer: Any, number: int, seen: list[Sublayer], given: Sequence[Tensor] | None, undo: contextlib.ExitStack
) -> None:
    names = [name for name in SUBLAYER_NORMS if getattr(layer, name, None) is not None]
    add = layer.residual_connection
    first = layer.register_forward_pre_hook(lambda *_: turn.append(len(seen)))
    undo.callback(first.remove)
    turn: list[int] = []

    def residual_connection(branch: Tensor, shortcut: Tensor) -> Any:
        name = names[len(seen) - turn[-1]]
        norm = getattr(layer, name)
        after = not layer.normalize_before and isinstance(norm, nn.LayerNorm)
        a, b = _scales(layer, norm)
        kind = name.replace("_layer_norm", "").replace("final", "ffn")
        total = add(branch if given is None else given[len(seen)], shortcut)
        # Where a norm follows, the hook below puts its output here.
        output = shortcut if after else total
        bottom = norm.bottom if isinstance(norm, BottomNorm) else None
        seen.append(Sublayer(number, kind, branch, shortcut, a, b, norm if after else None, bottom, output))
        return total

    def note_output(norm: nn.Module, inputs: Any, output: Tensor) -> None:
        seen[-1].output = output

    layer.residual_connection = residual_connection
    undo.callback(delattr, layer, "residual_connection")
    if not layer.normalize_before:
        for name in names:
            hook = getattr(layer, name).register_forward_hook(note_output)
            undo.callback(hook.remove)


def real_rows(x: Tensor, real: Tensor) -> Tensor:
    """The rows of the positions that are not padding. Shapes (T, B, C) and (R,) to (R, C)."""
    return x.flatten(0, 1).index_select(0, real)


def real_positions(words: Tensor, padding: int) -> Tensor:
    """Where in T·B a batch's real positions are. Shape (B, T) to (R,), int64."""
    return words.ne(padding).t().flatten().nonzero().squeeze(1)


def centred(x: Tensor) -> Tensor:
    """x without its mean over the channels. Shape (..., C)."""
    return x - x.mean(-1, keepdim=True)


def normalised(x: Tensor) -> Tensor:
    """x̂: without mean and of variance 1 over the channels. Shape (..., C)."""
    x = centred(x)
    return x / x.square().mean(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny).sqrt()
