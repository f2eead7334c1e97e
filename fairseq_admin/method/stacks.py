"""fairseq's encoder and decoder over the layers of a scheme."""

from __future__ import annotations

from typing import Any

from fairseq.models.transformer.transformer_decoder import TransformerDecoderBase
from fairseq.models.transformer.transformer_encoder import TransformerEncoderBase

from .fixup import Shift
from .layers import SchemeDecoderLayer, SchemeEncoderLayer, recomputed
from .schemes import SCHEMES, layers_of
from .second_stream import SecondNorm


class _SchemeStack:
    """What both stacks change in fairseq's: the first ω is fixed, and a stack ends in what its scheme ends in."""

    cfg: Any
    version: Any
    layer_norm: Any

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        scheme = SCHEMES[self.cfg.admin_scheme]
        is_encoder = isinstance(self, TransformerEncoderBase)
        if scheme.omega:
            layers_of(self)[0].self_attn_layer_norm.freeze_omega()
        if scheme.fixup:
            self.layer_norm = Shift(multiplier=is_encoder)
        elif scheme.second_stream:
            self.layer_norm = SecondNorm((self.cfg.encoder if is_encoder else self.cfg.decoder).embed_dim)

    def upgrade_state_dict_named(self, state_dict, name):
        """As fairseq's, which drops the end of a stack from a state without a version: its moving average (--store-ema)
        has none."""
        if any(key.startswith(f"{name}.layer_norm.") for key in state_dict):
            state_dict.setdefault(f"{name}.version", self.version)
        return super().upgrade_state_dict_named(state_dict, name)  # type: ignore[misc]


class AdminEncoder(_SchemeStack, TransformerEncoderBase):
    """fairseq's encoder over the layers of a scheme."""

    def build_encoder_layer(self, cfg):
        return recomputed(SchemeEncoderLayer(cfg, return_fc=self.return_fc), cfg)


class AdminDecoder(_SchemeStack, TransformerDecoderBase):
    """fairseq's decoder over the layers of a scheme."""

    def build_decoder_layer(self, cfg, no_encoder_attn=False):
        return recomputed(SchemeDecoderLayer(cfg, no_encoder_attn), cfg)
