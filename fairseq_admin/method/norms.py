"""Norms that compute their own input: branch plus scaled shortcut, or a sum plus the layer's input."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.omega import omega_from_depth
from .schemes import Stack, layers_of, norms_of


class ShortcutNorm(nn.LayerNorm):
    """LN(shortcut ⊙ ω + branch), with ω = omega_init + omega_delta (Liu et al. 2020, section 4.3).

    omega_init is a buffer: profiling fills it on the first batch, when the optimizer already has its own copy of every
    parameter. omega_delta is a parameter and starts at 0, so weight decay pulls ω to its profiled value. Both have
    shape (C,).

    Args:
        channels: C.
    """

    omega_init: Tensor
    omega_delta: nn.Parameter | None

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.register_buffer("omega_init", torch.ones(channels))
        self.omega_delta = nn.Parameter(torch.zeros(channels))

    def freeze_omega(self) -> None:
        """Stop training ω, for the first sub-layer of a stack.

        Its shortcut is the embedding, which is often tied to two other matrices, so a trained vector ω could not be
        folded. (A model whose first layer was pruned has such a vector; see `state_dict.prune`.)
        """
        del self.omega_delta  # fairseq's log would count a parameter that is None as shared
        self.omega_delta = None

    def set_omega(self, omega: float | Tensor) -> None:
        """Fill omega_init, in place.

        Args:
            omega: one number, or shape (1,).
        """
        with torch.no_grad():
            self.omega_init.copy_(torch.as_tensor(omega).expand_as(self.omega_init))

    @property
    def omega(self) -> Tensor:
        """ω as the forward uses it. Shape (C,)."""
        return self.omega_init if self.omega_delta is None else self.omega_init + self.omega_delta

    def forward(self, branch_and_shortcut: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        """Add the scaled shortcut to the branch, and normalise the sum.

        Args:
            branch_and_shortcut: f and x. Shapes (T, B, C), or (B·T, C) in a fast layer.

        Returns:
            The same shape.
        """
        branch, shortcut = branch_and_shortcut
        # Under autocast the branch is in half precision and the shortcut, a norm's output, is float32. So the sum is
        # float32, as in fairseq.
        return super().forward(shortcut * self.omega.to(shortcut.dtype) + branch)


def shortcut_norms(stack: Stack) -> list[ShortcutNorm]:
    """The norms of Admin's sub-layers.

    Args:
        stack: an encoder or a decoder of Admin.

    Returns:
        Its norms, in forward order.
    """
    return [getattr(layer, name) for layer in layers_of(stack) for name in norms_of(layer)]


def set_omega_by_depth(stack: Stack, rule: str) -> None:
    """Set every ω of a stack from its depth, in place.

    Args:
        stack: an encoder or a decoder of Admin.
        rule: one of DEPTH_RULES, or a number.
    """
    norms = shortcut_norms(stack)
    for norm in norms:
        norm.set_omega(omega_from_depth(rule, len(norms)))


class BottomNorm(nn.LayerNorm):
    """LN(x + the layer's input), the last norm of a layer with a bottom-to-top connection (Takase et al. 2022).

    The layer sets `bottom`, its input of shape (T, B, C), for the time of its forward.
    """

    bottom: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Add the layer's input, and normalise the sum.

        Args:
            x: the sum of shortcut and branch. Shape (T, B, C).

        Returns:
            Shape (T, B, C).
        """
        assert self.bottom is not None, "called outside its layer"
        return super().forward(x + self.bottom)
