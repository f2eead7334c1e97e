"""Observe the sub-layers of an encoder or a decoder while they run: branch, shortcut and output, in forward order.

Every layer, ours or fairseq's, adds its branch to its shortcut in `residual_connection`. For one forward, each layer
gets an instance method of that name, which reports its arguments and calls the layer's own. Profiling, monitoring and
analysis observe every scheme this way, and the model does not change.

    T time   B batch   C channels   S sub-layers   R real positions
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .norms import BottomNorm, ShortcutNorm
from .schemes import Layer, Stack, layers_of, norms_of


@dataclass
class Sublayer:
    """One sub-layer in one forward pass: output = norm(a · shortcut + b · branch + bottom), or without the norm."""

    layer: int
    """The index of its layer in the stack, from 0."""
    kind: str
    """"self_attn", "encoder_attn" or "ffn"."""
    branch: Tensor
    """f, before it is scaled. Shape (T, B, C)."""
    shortcut: Tensor
    """x, before it is scaled. Shape (T, B, C)."""
    a: Tensor | float
    """The factor of the shortcut: ω, of shape (C,), or one number."""
    b: Tensor | float
    """The factor of the branch: one number."""
    norm: nn.LayerNorm | None
    """The norm of the sum; None: the sum is the output."""
    bottom: Tensor | None
    """A third summand: the layer's input, in the last sub-layer of a B2T layer. Shape (T, B, C)."""
    output: Tensor
    """Shape (T, B, C)."""
    real: Tensor
    """Indices in T·B of the positions that are not padding. Shape (R,), int64."""

    def rows(self, x: Tensor) -> Tensor:
        """Select the real positions.

        Args:
            x: shape (T, B, C), or (B·T, C) in a fast layer.

        Returns:
            Shape (R, C).
        """
        return x.flatten(0, -2).index_select(0, self.real)

    @property
    def name(self) -> str:
        return f"layers.{self.layer}.{self.kind}"

    @property
    def scaled_branch(self) -> Tensor:
        """b · branch, in float32 or wider. Shape (T, B, C)."""
        return self.b * self.branch.to(torch.promote_types(self.branch.dtype, torch.float32))

    @property
    def total(self) -> Tensor:
        """The sum, in float32 or wider. A norm reads it, or it is the output. Shape (T, B, C)."""
        branch = self.scaled_branch
        total = self.a * self.shortcut.to(branch.dtype) + branch
        return total if self.bottom is None else total + self.bottom


def _scales(layer: Layer, norm: nn.Module) -> tuple[Tensor | float, Tensor | float]:
    """a and b of the sub-layer with this norm."""
    if isinstance(norm, ShortcutNorm):
        return norm.omega.detach(), 1.0
    shortcut, branch = getattr(layer, "shortcut_scale", None), getattr(layer, "branch_scale", None)
    return 1.0 if shortcut is None else shortcut, 1.0 if branch is None else branch.detach()


def watch(
    stack: Stack,
    tokens: Tensor,
    see: Callable[[Sublayer], object],
    undo: contextlib.ExitStack,
    branches: Iterable[Tensor] | None = None,
) -> None:
    """Report every sub-layer of a stack's next forward to `see`, before its norm runs.

    A layer is watched for one forward, because activation checkpointing runs it a second time. A layer that layerdrop
    skips is watched until `undo` is closed.

    Args:
        stack: an encoder or a decoder; outputs are right for plain layers only (--admin-fast off).
        tokens: its input. Shape (B, T).
        see: called with each sub-layer. If a norm follows, `output` is not computed yet.
        undo: close it after the forward.
        branches: S tensors that replace the sub-layers' branches in the sums. (`see` still gets the branches that the
            sub-layers compute.) Given another model's branches, every sub-layer gets the same input as in that model.
            Shapes (T, B, C).
    """
    replacements = None if branches is None else iter(branches)

    @cache
    def find_real() -> Tensor:
        # A fast stack knows whether it is batch-first only while it runs.
        return real_positions(tokens, stack.padding_idx, getattr(stack, "batch_first", False))

    def watch_layer(number: int, layer: Any) -> None:
        names = norms_of(layer)
        coming = iter(names)
        add = layer.residual_connection

        def residual_connection(branch: Tensor, shortcut: Tensor) -> Any:
            name = next(coming)
            norm = getattr(layer, name)
            after = not layer.normalize_before and isinstance(norm, nn.LayerNorm)
            total = add(branch if replacements is None else next(replacements), shortcut)
            if name == names[-1]:
                del layer.residual_connection
            kind = name.replace("_layer_norm", "").replace("final", "ffn")
            bottom = norm.bottom if isinstance(norm, BottomNorm) else None
            output = shortcut if after else total
            a, b = _scales(layer, norm)
            see(Sublayer(number, kind, branch, shortcut, a, b, norm if after else None, bottom, output, find_real()))
            return total

        layer.residual_connection = residual_connection
        undo.callback(vars(layer).pop, "residual_connection", None)

    for number, layer in enumerate(layers_of(stack)):
        watch_layer(number, layer)


@contextlib.contextmanager
def observed(
    stacks: Mapping[str, Stack], tokens: Mapping[str, Tensor], branches: Iterable[Tensor] | None = None
) -> Iterator[dict[str, list[Sublayer]]]:
    """In this block, the next forward of each stack fills the list of its sub-layers.

    Args:
        stacks: encoder, decoder or both, by side.
        tokens: their inputs, by side. Shapes (B, T).
        branches: see `watch`.

    Yields:
        The lists of sub-layers, by side.
    """
    seen: dict[str, list[Sublayer]] = {side: [] for side in stacks}
    with contextlib.ExitStack() as undo:
        for side, stack in stacks.items():
            watch(stack, tokens[side], seen[side].append, undo, branches)

            def note_output(norm: nn.Module, inputs: Any, output: Tensor, sublayers: list = seen[side]) -> None:
                sublayers[-1].output = output

            for layer in layers_of(stack):
                if not layer.normalize_before:
                    for name in norms_of(layer):
                        undo.callback(getattr(layer, name).register_forward_hook(note_output).remove)
        yield seen


def real_positions(words: Tensor, padding: int, batch_first: bool = False) -> Tensor:
    """Indices of the positions that are not padding.

    Args:
        words: a batch. Shape (B, T).
        padding: the index of padding.
        batch_first: whether to count in B·T; otherwise in T·B.

    Returns:
        Shape (R,), int64.
    """
    real = words.ne(padding)
    return (real if batch_first else real.t()).flatten().nonzero().squeeze(1)


def channel_variance(x: Tensor) -> Tensor:
    """The variance over the channels.

    Args:
        x: shape (..., C).

    Returns:
        Shape (...,).
    """
    return centred(x).square().mean(-1)


def own_share(sublayer: Sublayer) -> Tensor:
    """β_{i,i}²: the share of a sub-layer's own branch in its normalised sum.

        β_{i,i}² = E[ Var_C[b f_i] / Var_C[a x_{i-1} + b f_i] ]          Liu et al. 2020, section 4.1

    Var_C is the variance over the channels of one position, because the norm divides each position by its own
    deviation. E is the mean over the real positions.

    Args:
        sublayer: observed in a forward; `output` is not used.

    Returns:
        A scalar, float32 or wider, on the sub-layer's device.
    """
    branch, total = sublayer.rows(sublayer.scaled_branch), sublayer.rows(sublayer.total)
    return (channel_variance(branch) / channel_variance(total)).mean()


def centred(x: Tensor) -> Tensor:
    """Subtract the mean over the channels.

    Args:
        x: shape (..., C).

    Returns:
        The same shape.
    """
    return x - x.mean(-1, keepdim=True)
