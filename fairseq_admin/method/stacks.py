"""fairseq's encoder and decoder, built from the layers of a scheme."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer.transformer_decoder import TransformerDecoderBase
from fairseq.models.transformer.transformer_encoder import TransformerEncoderBase

from .fixup import Shift
from .layers import SchemeDecoderLayer, SchemeEncoderLayer
from .schemes import SCHEMES, Stack, layers_of
from .second_stream import SecondNorm


class _SchemeStack(Stack if TYPE_CHECKING else object):  # type: ignore[misc]
    """Changes to both of fairseq's stacks: the first ω is not trained, and some schemes end a stack in a module of
    their own."""

    cfg: TransformerConfig
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
        """Keep the norm that ends a stack. fairseq drops it from a state dict without a version, such as a moving
        average (--store-ema)."""
        if any(key.startswith(f"{name}.layer_norm.") for key in state_dict):
            state_dict.setdefault(f"{name}.version", self.version)
        return super().upgrade_state_dict_named(state_dict, name)  # type: ignore[misc]


class AdminEncoder(_SchemeStack, TransformerEncoderBase):
    """fairseq's encoder over the layers of `cfg.admin_scheme`.

    Args: as fairseq's, `cfg` with Admin's options (architectures/config.py).
    """

    def build_encoder_layer(self, cfg):
        return SchemeEncoderLayer(cfg, return_fc=self.return_fc)


class AdminDecoder(_SchemeStack, TransformerDecoderBase):
    """fairseq's decoder over the layers of `cfg.admin_scheme`.

    Args: as fairseq's, `cfg` with Admin's options (architectures/config.py).
    """

    def build_decoder_layer(self, cfg, no_encoder_attn=False):
        return SchemeDecoderLayer(cfg, no_encoder_attn)
