"""fairseq's encoder and decoder over the layers of a scheme."""

from __future__ import annotations

from typing import Any

from fairseq.models.transformer.transformer_decoder import TransformerDecoderBase
from fairseq.models.transformer.transformer_encoder import TransformerEncoderBase

from .fixup import Shift
from .layers import (
    AdminDecoderLayer,
    AdminEncoderLayer,
    ScaledDecoderLayer,
    ScaledEncoderLayer,
    StockDecoderLayer,
    StockEncoderLayer,
    ffn_law,
    wrap_layer,
)
from .schemes import EVERY, layers_of
from .second_stream import SecondNorm


def _set_up(stack: Any, channels: int, multiplier: bool) -> None:
    """Fix the first ω of a new stack, and put what its scheme ends in, if not fairseq's, in place of the norm there."""
    scheme = EVERY[stack.cfg.admin_scheme]
    if scheme.omega:
        layers_of(stack)[0].self_attn_layer_norm.freeze_omega()
    if scheme.fixup:
        stack.layer_norm = Shift(multiplier)
    elif scheme.second_stream:
        stack.layer_norm = SecondNorm(channels)


def _keep_end(stack: Any, state: dict[str, Any], name: str) -> None:
    """Let fairseq take a state that has what the stack ends in for one of today's, also without a version.

    fairseq drops that end for an older state. One without a version is its own moving average's (--store-ema).
    """
    if any(key.startswith(f"{name}.layer_norm.") for key in state):
        state.setdefault(f"{name}.version", stack.version)


class AdminEncoder(TransformerEncoderBase):
    """fairseq's encoder over the layers of a scheme."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        _set_up(self, self.cfg.encoder.embed_dim, multiplier=True)

    def build_encoder_layer(self, cfg):
        scheme = EVERY[cfg.admin_scheme]
        if scheme.stock_layers and ffn_law(cfg) != "xavier":
            return super().build_encoder_layer(cfg)
        if scheme.stock_layers:
            return wrap_layer(StockEncoderLayer(cfg, return_fc=self.return_fc), cfg)
        if scheme.omega:
            return wrap_layer(AdminEncoderLayer(cfg, return_fc=self.return_fc), cfg)
        return wrap_layer(ScaledEncoderLayer(cfg, scheme, return_fc=self.return_fc), cfg)

    def upgrade_state_dict_named(self, state_dict, name):
        _keep_end(self, state_dict, name)
        return super().upgrade_state_dict_named(state_dict, name)


class AdminDecoder(TransformerDecoderBase):
    """fairseq's decoder over the layers of a scheme."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        _set_up(self, self.cfg.decoder.embed_dim, multiplier=False)

    def build_decoder_layer(self, cfg, no_encoder_attn=False):
        scheme = EVERY[cfg.admin_scheme]
        if scheme.stock_layers and ffn_law(cfg) != "xavier":
            return super().build_decoder_layer(cfg, no_encoder_attn)
        if scheme.stock_layers:
            return wrap_layer(StockDecoderLayer(cfg, no_encoder_attn), cfg)
        if scheme.omega:
            return wrap_layer(AdminDecoderLayer(cfg, no_encoder_attn), cfg)
        return wrap_layer(ScaledDecoderLayer(cfg, scheme, no_encoder_attn), cfg)

    def upgrade_state_dict_named(self, state_dict, name):
        _keep_end(self, state_dict, name)
        return super().upgrade_state_dict_named(state_dict, name)
