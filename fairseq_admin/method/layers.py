"""fairseq's layers with the sub-layers of a scheme.

fairseq's layers compute `norm(residual_connection(branch, shortcut))` and do not say which sub-layer calls it.
`residual_connection` itself applies a scale that all sub-layers of a layer share. Each sub-layer has its own ω, so for
ω this method returns the pair (branch, shortcut), and the sub-layer's norm computes the sum. So a forward hook on the
norm sees branch, shortcut and output.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from . import fixup
from .branch_norms import norm_inputs, norm_outputs
from .norms import BottomNorm, ShortcutNorm
from .schemes import SCHEMES, Layer, norms_of
from .second_stream import pack, unpack


def xavier(linear: nn.Linear) -> nn.Linear:
    """Draw a linear layer's weights Xavier-uniform, with zero bias, in place, as the papers' fairseq did.

    Since 0.10 fairseq's feed-forward layers start with nn.Linear's smaller weights.

    Args:
        linear: the layer.

    Returns:
        The same layer.
    """
    nn.init.xavier_uniform_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def ffn_law(cfg: TransformerConfig) -> str | None:
    """The initial distribution of a model's feed-forward weights.

    Args:
        cfg: the model's options.

    Returns:
        One of FFN_LAWS. None: the scheme draws them.
    """
    law = SCHEMES[cfg.admin_scheme].ffn
    return law and (cfg.admin_ffn_init or law)


class _SchemeLayer(Layer if TYPE_CHECKING else object):  # type: ignore[misc]
    """The changes that the scheme's row of the table makes to fairseq's encoder layer and decoder layer.

    If the scheme has them, the state dict holds a as the buffer `shortcut_scale`, and b as `branch_scale`, a parameter
    if b is trained, else a buffer. Their shapes are (1,).
    """

    side: int
    """The index of this layer's stack in a `PerStack`."""
    register_buffer: Callable[..., None]
    shortcut_scale: Tensor | None
    branch_scale: Tensor | None
    d: Tensor | None = None
    """The second stream, within a forward."""

    def __init__(self, cfg: TransformerConfig, *args, **kwargs) -> None:
        self.scheme = SCHEMES[cfg.admin_scheme]
        self._xavier = ffn_law(cfg) == "xavier"
        super().__init__(cfg, *args, **kwargs)  # type: ignore[call-arg]
        self.recompute, self.offload = cfg.checkpoint_activations, cfg.offload_activations
        scheme = self.scheme
        depths = cfg.encoder.layers, cfg.decoder.layers
        scale = torch.tensor([scheme.shortcut(*depths)[self.side]]) if scheme.shortcut else None
        self.register_buffer("shortcut_scale", scale)
        if scheme.branch_scale:
            self.register_buffer("branch_scale", torch.tensor([scheme.branch_scale(*depths)[self.side]]))
        else:
            self.branch_scale = nn.Parameter(torch.zeros(1)) if scheme.branch else None
        if scheme.branch_norm:
            (norm_inputs if scheme.branch_norm == "input" else norm_outputs)(self)
        if scheme.bottom:
            self.final_layer_norm = BottomNorm(self.embed_dim)
        if scheme.fixup:
            self._replace_norms(fixup.Shift)
            fixup.set_up_layer(self)
        elif scheme.omega:
            self._replace_norms(lambda: ShortcutNorm(self.embed_dim))
        elif scheme.norm[self.side] == "none":
            self._replace_norms(nn.Identity)

    def _replace_norms(self, make: Callable[[], nn.Module]) -> None:
        for name in norms_of(self):
            setattr(self, name, make())

    def build_fc1(self, *args):
        linear = super().build_fc1(*args)  # type: ignore[misc]
        return xavier(linear) if self._xavier else linear

    def build_fc2(self, *args):
        linear = super().build_fc2(*args)  # type: ignore[misc]
        return xavier(linear) if self._xavier else linear

    def forward(self, x: Tensor, *args, **kwargs):
        """Compute as fairseq's layer does. With a second stream, x holds both streams: shape (T, B, 2C).

        Under --checkpoint-activations a layer keeps only its input, and recomputes the rest. With --offload-activations
        it keeps its input on the CPU. torch recomputes under the same conditions as in the forward. fairseq's own
        wrapper forgets autocast: under --amp it would compute in float32, which takes other kernels, more time and more
        memory.
        """
        if not self.recompute:
            return self._forward(x, *args, **kwargs)
        with save_on_cpu() if self.offload else contextlib.nullcontext():
            return checkpoint(self._forward, x, *args, use_reentrant=False, **kwargs)

    def _forward(self, x: Tensor, *args, **kwargs):
        if self.scheme.second_stream:
            x, self.d = unpack(x, self.embed_dim)
            try:  # torch ends the recomputation of a layer by an exception
                return pack(super().forward(x, *args, **kwargs), self.d)  # type: ignore[misc]
            finally:
                self.d = None
        if isinstance(self.final_layer_norm, BottomNorm):
            self.final_layer_norm.bottom = x
            try:
                return super().forward(x, *args, **kwargs)  # type: ignore[misc]
            finally:
                self.final_layer_norm.bottom = None
        return super().forward(x, *args, **kwargs)  # type: ignore[misc]

    def residual_connection(self, x: Tensor, residual: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """a · shortcut + b · branch, or the pair (branch, shortcut) for a norm that sums it. Shapes (T, B, C)."""
        if self.scheme.omega:
            return x, residual
        if self.branch_scale is not None:
            x = x * self.branch_scale
        if self.d is not None:
            self.d = self.d + x
        if self.shortcut_scale is not None:
            residual = residual * self.shortcut_scale
        return residual + x


class SchemeEncoderLayer(_SchemeLayer, TransformerEncoderLayerBase):
    """fairseq's encoder layer with the sub-layers of a scheme."""

    side = 0


class SchemeDecoderLayer(_SchemeLayer, TransformerDecoderLayerBase):
    """fairseq's decoder layer with the sub-layers of a scheme."""

    side = 1
