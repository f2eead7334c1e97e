"""fairseq's layers with shortcut or branch scaled, nothing else changed.

fairseq's layers compute `norm(residual_connection(branch, shortcut))` and do not say which sub-layer is at it. A scale
that is a whole layer's is applied right there. ω is a sub-layer's: `residual_connection` returns the pair, and each
sub-layer's own norm, which knows its ω, adds it up. A forward hook on such a norm therefore sees the sub-layer's
branch, shortcut and output, and costs nothing where there is none.
"""

from __future__ import annotations

import torch
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from torch import Tensor, nn

from . import fixup
from .branch_norms import norm_inputs, norm_outputs
from .norms import BottomNorm, ShortcutNorm
from .recomputed import recomputed
from .schemes import EVERY, SUBLAYER_NORMS, Scheme
from .second_stream import pack, unpack


def xavier(linear: nn.Linear) -> nn.Linear:
    """Draw its weights as the papers' fairseq did; since 0.10 feed-forward layers have nn.Linear's smaller ones."""
    nn.init.xavier_uniform_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def ffn_law(cfg) -> str | None:
    """The law that a model's feed-forward weights start with, from its options; None: its scheme draws them."""
    return EVERY[cfg.admin_scheme].ffn_law(cfg.admin_ffn_init)


class _FeedForward:
    """What every layer changes in fairseq's: the law of its feed-forward weights."""

    def __init__(self, cfg, *args, **kwargs) -> None:
        self._xavier = ffn_law(cfg) == "xavier"  # before fairseq's, which builds fc1 and fc2
        super().__init__(cfg, *args, **kwargs)  # type: ignore[call-arg]

    def build_fc1(self, *args):
        linear = super().build_fc1(*args)  # type: ignore[misc]
        return xavier(linear) if self._xavier else linear

    def build_fc2(self, *args):
        linear = super().build_fc2(*args)  # type: ignore[misc]
        return xavier(linear) if self._xavier else linear


class StockEncoderLayer(_FeedForward, TransformerEncoderLayerBase):
    """Stock encoder layer."""


class StockDecoderLayer(_FeedForward, TransformerDecoderLayerBase):
    """Stock decoder layer."""


class _AdminLayer(_FeedForward):
    """What both of Admin's layers change in fairseq's."""

    def residual_connection(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return x, residual


class AdminEncoderLayer(_AdminLayer, TransformerEncoderLayerBase):
    """Stock encoder layer; its two norms scale their shortcuts."""

    def __init__(self, cfg, return_fc: bool = False) -> None:
        super().__init__(cfg, return_fc=return_fc)
        self.self_attn_layer_norm = ShortcutNorm(self.embed_dim)
        self.final_layer_norm = ShortcutNorm(self.embed_dim)


class AdminDecoderLayer(_AdminLayer, TransformerDecoderLayerBase):
    """Stock decoder layer; its three norms (two without encoder-attention) scale their shortcuts."""

    def __init__(self, cfg, no_encoder_attn: bool = False) -> None:
        super().__init__(cfg, no_encoder_attn)
        self.self_attn_layer_norm = ShortcutNorm(self.embed_dim)
        if not no_encoder_attn:
            self.encoder_attn_layer_norm = ShortcutNorm(self.embed_dim)
        self.final_layer_norm = ShortcutNorm(self.embed_dim)


class _ScaledLayer(_FeedForward):
    """What both layers of the schemes without ω change in fairseq's.

    The state dict holds a as `shortcut_scale`, a buffer, and b as `branch_scale`, a parameter, both of shape (1,) and
    only where the scheme has them.
    """

    final_layer_norm: nn.Module

    shortcut_scale: Tensor | None
    branch_scale: nn.Parameter | None
    second_stream: bool
    d: Tensor | None = None
    """The second stream, within a forward."""

    def _set_up(self, scheme: Scheme, stack: int, cfg) -> None:
        """Take over what a row of the table says of the encoder (stack 0) or the decoder (stack 1)."""
        shortcut = (
            torch.tensor([scheme.shortcut(cfg.encoder.layers, cfg.decoder.layers)[stack]]) if scheme.shortcut else None
        )
        self.register_buffer("shortcut_scale", shortcut)  # type: ignore[attr-defined]
        self.branch_scale = nn.Parameter(torch.zeros(1)) if scheme.branch else None
        self.second_stream = scheme.second_stream
        if scheme.branch_norm:
            (norm_inputs if scheme.branch_norm == "input" else norm_outputs)(self)
        if scheme.bottom:
            self.final_layer_norm = BottomNorm(self.embed_dim)  # type: ignore[attr-defined]
        if scheme.fixup:
            fixup.set_up_layer(self)
        elif scheme.norm[stack] == "none":
            for name in SUBLAYER_NORMS:
                if getattr(self, name, None) is not None:
                    setattr(self, name, nn.Identity())

    def forward(self, x: Tensor, *args, **kwargs):
        """As fairseq's; with a second stream, x holds both."""
        if self.second_stream:
            x, self.d = unpack(x, self.embed_dim)  # type: ignore[attr-defined]
            try:
                return pack(super().forward(x, *args, **kwargs), self.d)  # type: ignore[misc]
            finally:
                self.d = None
        if not isinstance(self.final_layer_norm, BottomNorm):
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        self.final_layer_norm.bottom = x
        try:
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.final_layer_norm.bottom = None

    def residual_connection(self, x: Tensor, residual: Tensor) -> Tensor:
        """a · shortcut + b · branch. Shapes (T, B, C)."""
        if self.branch_scale is not None:
            x = x * self.branch_scale
        if self.d is not None:
            self.d = self.d + x
        if self.shortcut_scale is not None:
            residual = residual * self.shortcut_scale
        return residual + x


class ScaledEncoderLayer(_ScaledLayer, TransformerEncoderLayerBase):
    """Stock encoder layer, shortcut and branch scaled, or without norms."""

    def __init__(self, cfg, scheme: Scheme, return_fc: bool = False) -> None:
        super().__init__(cfg, return_fc=return_fc)
        self._set_up(scheme, 0, cfg)


class ScaledDecoderLayer(_ScaledLayer, TransformerDecoderLayerBase):
    """Stock decoder layer, shortcut and branch scaled, or without norms."""

    def __init__(self, cfg, scheme: Scheme, no_encoder_attn: bool = False) -> None:
        super().__init__(cfg, no_encoder_attn)
        self._set_up(scheme, 1, cfg)


def wrap_layer(layer: nn.Module, cfg) -> nn.Module:
    """What fairseq's build_encoder_layer and build_decoder_layer do to a layer they have made."""
    return recomputed(layer, cfg.offload_activations) if cfg.checkpoint_activations else layer
