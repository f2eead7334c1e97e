"""Norms of a layer that add up themselves what they normalise: a scaled shortcut, or the layer's input as well."""

from __future__ import annotations

import torch
from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase
from torch import Tensor, nn

from .schemes import layers_of, norms_of


class ShortcutNorm(nn.LayerNorm):
    """LN(shortcut ⊙ ω + branch), with ω = omega_init + omega_delta (Liu et al. 2020, section 4.3).

    omega_init is a buffer: it is filled on the first batch, when the optimizer already holds its own copy of every
    parameter. omega_delta, what training adds, is a parameter and starts at 0; weight decay thus pulls ω to its
    profiled value. Both have shape (C,).
    """

    omega_init: Tensor
    omega_delta: nn.Parameter | None

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.register_buffer("omega_init", torch.ones(channels))
        self.omega_delta = nn.Parameter(torch.zeros(channels))

    def freeze_omega(self) -> None:
        """Keep ω as it was set: the first sub-layer of a stack.

        Its shortcut is the embedding, often tied to two other matrices, so a learned vector ω could not be folded away.
        (A model pruned of its first layer has one there; see `state_dict.prune`.)
        """
        del self.omega_delta  # as a parameter that is None it would be shared with all others, by fairseq's log
        self.omega_delta = None

    def set_omega(self, omega: float | Tensor) -> None:
        """Fill omega_init with one profiled scalar."""
        with torch.no_grad():
            self.omega_init.copy_(torch.as_tensor(omega).expand_as(self.omega_init))

    @property
    def omega(self) -> Tensor:
        """ω as the forward uses it. Shape (C,)."""
        return self.omega_init if self.omega_delta is None else self.omega_init + self.omega_delta

    def forward(self, branch_and_shortcut: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        """Shapes: branch and shortcut (T, B, C), output (T, B, C)."""
        branch, shortcut = branch_and_shortcut
        # Under autocast the branch is half and the shortcut, a norm's output, is float: the sum is float, as stock's.
        return super().forward(shortcut * self.omega.to(shortcut.dtype) + branch)


def shortcut_norms(stack: TransformerEncoderBase | TransformerDecoderBase) -> list[ShortcutNorm]:
    """The norms of the sub-layers of an encoder or a decoder, in forward order."""
    return [getattr(layer, name) for layer in layers_of(stack) for name in norms_of(layer)]


class BottomNorm(nn.LayerNorm):
    """LN(x + the layer's input), the last norm of a layer with a bottom-to-top connection (Takase et al. 2022)."""

    bottom: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Shape (T, B, C)."""
        assert self.bottom is not None, "outside of its layer"
        return super().forward(x + self.bottom)
