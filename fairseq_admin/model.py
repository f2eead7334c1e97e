"""The model `transformer_admin`: fairseq's Transformer with Admin or another scheme; and its `--arch` presets."""

from typing import Any, Dict

import torch
from fairseq.models import MODEL_REGISTRY, register_model, register_model_architecture
from fairseq.models.transformer import TransformerConfig, TransformerModelBase
from fairseq.models.transformer.transformer_decoder import TransformerDecoderBase
from fairseq.models.transformer.transformer_encoder import TransformerEncoderBase

from . import __version__, provenance
from .checkpoint import adopt
from .config import DEPTH_RULES, TransformerAdminConfig, fill_sizes, nested, refuse_unsuitable
from .divergence import SkippedUpdates
from .errors import AdminError
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
from .omega import omega_from_depth
from .profiling import profile
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


@register_model("transformer_admin", dataclass=TransformerAdminConfig)
class TransformerAdminModel(TransformerModelBase):
    """Transformer with a scheme of the table in schemes.py: Admin, unless the options say otherwise.

    With Admin (Liu et al. 2020) ω is profiled on the first training batch, then trained. The state dict holds, beside
    the stock Transformer's entries, `omega_init` and `omega_delta` in every norm (no `omega_delta` in a stack's first)
    and `admin_provenance`; while the latter is zero, ω has not been profiled. The state dict of a scheme over stock
    layers is a stock Transformer's; every other one's has `admin_provenance`, which then names the scheme.
    """

    def __init__(self, cfg: TransformerConfig, encoder: AdminEncoder, decoder: AdminDecoder) -> None:
        super().__init__(cfg, encoder, decoder)
        self.scheme = SCHEMES[cfg.admin_scheme]
        self.profiled = not self.scheme.omega
        self.skipped_updates = SkippedUpdates(cfg.admin_max_skipped_updates, max(cfg.update_freq))
        if self.scheme.weights is not None:
            self.scheme.weights(encoder, decoder)
        if self.scheme.stock_layers:
            return
        self.register_buffer(provenance.KEY, torch.zeros(provenance.LENGTH))
        if not self.scheme.omega:
            self._record({"scheme": cfg.admin_scheme, "version": __version__})
        elif cfg.admin_init in DEPTH_RULES:
            for stack in (encoder, decoder):
                norms = shortcut_norms(stack)
                for norm in norms:
                    norm.set_omega(omega_from_depth(cfg.admin_init, len(norms)))
            self._record({"rule": cfg.admin_init, "version": __version__})

    @classmethod
    def add_args(cls, parser) -> None:
        # TransformerModelBase has options of its own here; this is what fairseq does for every other dataclass.
        super(TransformerModelBase, cls).add_args(parser)

    @classmethod
    def build_model(cls, cfg, task):
        transformer_cfg = nested(cfg)
        refuse_unsuitable(transformer_cfg)
        norm = SCHEMES[transformer_cfg.admin_scheme].norm
        for stack, place in zip((transformer_cfg.encoder, transformer_cfg.decoder), norm):
            stack.normalize_before = place == "before"
        return super().build_model(transformer_cfg, task)

    @classmethod
    def build_encoder(cls, cfg, src_dict, embed_tokens):
        return AdminEncoder(cfg, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, cfg, tgt_dict, embed_tokens):
        return AdminDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)

    def _record(self, record: Dict[str, Any]) -> None:
        buffer = getattr(self, provenance.KEY)
        buffer.copy_(provenance.encode(record))
        self.profiled = True

    def set_num_updates(self, num_updates: int) -> None:
        super().set_num_updates(num_updates)
        if self.training:
            self.skipped_updates.before_batch(num_updates)

    def forward(self, src_tokens, src_lengths, prev_output_tokens, **kwargs):
        """As fairseq's Transformer; the first call in training mode profiles ω on its batch beforehand."""
        if self.training and not self.profiled:
            cfg = self.cfg
            self._record(profile(self, src_tokens, prev_output_tokens, cfg.admin_init, cfg.admin_profile_tokens))
        return super().forward(src_tokens, src_lengths, prev_output_tokens, **kwargs)

    def load_state_dict(self, state_dict, strict=True, model_cfg=None, args=None):
        """As fairseq's; with Admin, a stock Post-LN Transformer's weights load with ω = 1, its function unchanged.

        Raises:
            AdminError: the weights are of another depth, or of another scheme.
        """
        own = self.state_dict()
        found = provenance.scheme(state_dict)
        if found != provenance.scheme(own) and not (self.scheme.omega and provenance.KEY not in state_dict):
            raise AdminError(
                f"the checkpoint is of --admin-scheme {found} and the model of --admin-scheme {self.cfg.admin_scheme}. "
                "Give the checkpoint's, or another --save-dir to start anew."
            )
        depths = {
            side: stack.layers
            for side, stack in (("encoder", self.cfg.encoder), ("decoder", self.cfg.decoder))
            if not stack.layers_to_keep
        }
        adopt(state_dict, own, depths)
        self.skipped_updates.restart()  # fairseq has just told the number of updates, and no batch has come with it
        result = super().load_state_dict(state_dict, strict, model_cfg, args)
        if self.scheme.omega:
            self.profiled = provenance.decode(getattr(self, provenance.KEY)) is not None
        return result


assert MODEL_REGISTRY["transformer_admin"] is TransformerAdminModel, "another plugin took the name transformer_admin"


def _preset(arch: str, **sizes: int) -> None:
    register_model_architecture("transformer_admin", arch)(lambda args: fill_sizes(args, **sizes))


_preset("transformer_admin_6l")
_preset("transformer_admin_12l", encoder_layers=12, decoder_layers=12)
_preset("transformer_admin_18l", encoder_layers=18, decoder_layers=18)
_preset("transformer_admin_60l_12l", encoder_layers=60, decoder_layers=12)
_preset("transformer_admin_iwslt_de_en", ffn_embed_dim=1024, attention_heads=4)
_preset(
    "transformer_admin_tiny", encoder_layers=2, decoder_layers=2, embed_dim=64, ffn_embed_dim=128, attention_heads=4
)
