"""fairseq's encoder and decoder over the layers of a scheme."""

from __future__ import annotations

from fairseq.models.transformer.transformer_decoder import TransformerDecoderBase
from fairseq.models.transformer.transformer_encoder import TransformerEncoderBase

from .fixup import Shift
from .layers import (
    AdminDecoderLayer,
    AdminEncoderLayer,
    ScaledDecoderLayer,
    ScaledEncoderLayer,
    avoid_fast_path,
    shortcut_norms,
    wrap_layer,
)
from .schemes import SCHEMES


class AdminEncoder(TransformerEncoderBase):
    """fairseq's encoder over the layers of a scheme."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if SCHEMES[self.cfg.admin_scheme].omega:
            shortcut_norms(self)[0].freeze_omega()
        if SCHEMES[self.cfg.admin_scheme].fixup:
            self.layer_norm = Shift(multiplier=True)
        avoid_fast_path(self)

    def build_encoder_layer(self, cfg):
        scheme = SCHEMES[cfg.admin_scheme]
        if scheme.stock_layers:
            return super().build_encoder_layer(cfg)
        if scheme.omega:
            return wrap_layer(AdminEncoderLayer(cfg, return_fc=self.return_fc), cfg)
        return wrap_layer(ScaledEncoderLayer(cfg, scheme, return_fc=self.return_fc), cfg)


class AdminDecoder(TransformerDecoderBase):
    """fairseq's decoder over the layers of a scheme."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if SCHEMES[self.cfg.admin_scheme].omega:
            shortcut_norms(self)[0].freeze_omega()
        if SCHEMES[self.cfg.admin_scheme].fixup:
            self.layer_norm = Shift()

    def build_decoder_layer(self, cfg, no_encoder_attn=False):
        scheme = SCHEMES[cfg.admin_scheme]
        if scheme.stock_layers:
            return super().build_decoder_layer(cfg, no_encoder_attn)
        if scheme.omega:
            return wrap_layer(AdminDecoderLayer(cfg, no_encoder_attn), cfg)
        return wrap_layer(ScaledDecoderLayer(cfg, scheme, no_encoder_attn), cfg)
