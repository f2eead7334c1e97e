"""The model `transformer_admin`: fairseq's Transformer, Post-LN, with Admin; and its `--arch` presets."""

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
from .layers import AdminDecoderLayer, AdminEncoderLayer, shortcut_norms, wrap_layer
from .omega import omega_from_depth
from .profiling import profile


class AdminEncoder(TransformerEncoderBase):
    """fairseq's encoder over AdminEncoderLayers."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        shortcut_norms(self)[0].freeze_omega()

    def build_encoder_layer(self, cfg):
        return wrap_layer(AdminEncoderLayer(cfg, return_fc=self.return_fc), cfg)


class AdminDecoder(TransformerDecoderBase):
    """fairseq's decoder over AdminDecoderLayers."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        shortcut_norms(self)[0].freeze_omega()

    def build_decoder_layer(self, cfg, no_encoder_attn=False):
        return wrap_layer(AdminDecoderLayer(cfg, no_encoder_attn), cfg)


@register_model("transformer_admin", dataclass=TransformerAdminConfig)
class TransformerAdminModel(TransformerModelBase):
    """Post-LN Transformer with Admin (Liu et al. 2020): ω is profiled on the first training batch, then trained.

    The state dict holds, beside the stock Transformer's entries, `omega_init` and `omega_delta` in every norm (no
    `omega_delta` in a stack's first) and `admin_provenance`; while the latter is zero, ω has not been profiled.
    """

    def __init__(self, cfg: TransformerConfig, encoder: AdminEncoder, decoder: AdminDecoder) -> None:
        super().__init__(cfg, encoder, decoder)
        self.register_buffer(provenance.KEY, torch.zeros(provenance.LENGTH))
        self.profiled = False
        self.skipped_updates = SkippedUpdates(cfg.admin_max_skipped_updates, max(cfg.update_freq))
        if cfg.admin_init in DEPTH_RULES:
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
        """As fairseq's; a stock Post-LN Transformer's weights load with ω = 1, which leaves its function unchanged.

        Raises:
            AdminError: the weights are of another depth, or Pre-LN.
        """
        depths = {
            side: stack.layers
            for side, stack in (("encoder", self.cfg.encoder), ("decoder", self.cfg.decoder))
            if not stack.layers_to_keep
        }
        adopt(state_dict, self.state_dict(), depths)
        self.skipped_updates.restart()  # fairseq has just told the number of updates, and no batch has come with it
        result = super().load_state_dict(state_dict, strict, model_cfg, args)
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
