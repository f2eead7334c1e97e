"""The model `transformer_admin`: fairseq's Transformer, Post-LN, with Admin. Options, encoder, decoder, presets."""

import logging
from argparse import Namespace
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, Dict, List, Optional, Type

import torch
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import MODEL_REGISTRY, register_model, register_model_architecture
from fairseq.models.transformer import TransformerConfig, TransformerModelBase
from fairseq.models.transformer.transformer_decoder import TransformerDecoderBase
from fairseq.models.transformer.transformer_encoder import TransformerEncoderBase
from omegaconf import II, OmegaConf

from . import __version__, provenance
from .checkpoint import adopt
from .divergence import SkippedUpdates
from .errors import AdminError
from .layers import AdminDecoderLayer, AdminEncoderLayer, shortcut_norms, wrap_layer
from .omega import omega_from_depth
from .profiling import profile

logger = logging.getLogger(__name__)

DEPTH_RULES = ("log", "constant")
RULES = ("reference", "paper") + DEPTH_RULES


def _flat(config: Type[FairseqDataclass]) -> Type[FairseqDataclass]:
    """fairseq's nested TransformerConfig as one flat dataclass: encoder.layers becomes encoder_layers.

    fairseq turns command-line options into a registered dataclass only where the names match, and they are flat. Sizes
    have no default here: an --arch preset, or else the base preset, fills in those that were not given.
    """
    flat = []
    for outer in fields(config):
        inner = outer.default if outer.name in ("encoder", "decoder", "quant_noise") else None
        for item in fields(inner) if inner is not None else [outer]:  # type: ignore[arg-type]
            name = f"{outer.name}_{item.name}" if inner is not None else item.name
            metadata, kind, default = dict(item.metadata), item.type, item.default
            if item.name.startswith("_"):
                continue
            if inner is not None and "help" in metadata:
                metadata["help"] = f"{outer.name}: {metadata['help']}"
            if item.name in ("input_dim", "output_dim", "embed_dim", "ffn_embed_dim", "layers", "attention_heads"):
                kind, default = Optional[int], None
            elif item.name == "layers_to_keep":
                kind = Optional[str]  # fairseq splits it at commas
            flat.append((name, kind, field(default=default, metadata=metadata)))
    return make_dataclass("FlatTransformerConfig", flat, bases=(FairseqDataclass,))


@dataclass
class TransformerAdminConfig(_flat(TransformerConfig)):  # type: ignore[misc]
    """Every option of fairseq's Transformer, and Admin's own."""

    admin_init: ChoiceEnum(RULES) = field(  # type: ignore[valid-type]
        default="reference",
        metadata={
            "help": "how the shortcut scales omega are set: from the first training batch as the authors' code does "
            "(reference) or as the paper says (paper), or from the depth alone (log, constant)"
        },
    )
    admin_profile_tokens: int = field(
        default=8192,
        metadata={"help": "tokens of the first training batch, padding included, to profile on at most"},
    )
    admin_max_skipped_updates: int = field(
        default=100,
        metadata={"help": "stop training after this many updates skipped in a row (overflow, OOM); 0: never"},
    )
    update_freq: List[int] = II("optimization.update_freq")


def _default(args: Any, name: str, value: Any) -> None:
    if getattr(args, name, None) is None:
        setattr(args, name, value)


def fill_sizes(
    args: Any,
    encoder_layers: int = 6,
    decoder_layers: int = 6,
    embed_dim: int = 512,
    ffn_embed_dim: int = 2048,
    attention_heads: int = 8,
) -> None:
    """Give every size that is still open a preset's value; an open width of the decoder follows the encoder's."""
    _default(args, "encoder_embed_dim", embed_dim)
    _default(args, "encoder_ffn_embed_dim", ffn_embed_dim)
    _default(args, "encoder_attention_heads", attention_heads)
    _default(args, "encoder_layers", encoder_layers)
    _default(args, "decoder_embed_dim", args.encoder_embed_dim)
    _default(args, "decoder_ffn_embed_dim", args.encoder_ffn_embed_dim)
    _default(args, "decoder_attention_heads", attention_heads)
    _default(args, "decoder_layers", decoder_layers)
    _default(args, "decoder_input_dim", args.decoder_embed_dim)
    _default(args, "decoder_output_dim", args.decoder_embed_dim)


def _nested(cfg: Any) -> TransformerConfig:
    """The options as fairseq's own layers read them, with Admin's beside them."""
    flat: Any = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True) if OmegaConf.is_config(cfg) else vars(cfg)
    args = Namespace(**flat)
    fill_sizes(args)
    return TransformerConfig.from_namespace(args)


def _refuse_unsuitable(cfg: TransformerConfig) -> None:
    """Raises AdminError for options under which Admin is not Admin."""
    if cfg.encoder.normalize_before or cfg.decoder.normalize_before:
        raise AdminError(
            "--encoder-normalize-before or --decoder-normalize-before was given, and Admin is for Post-LN. Leave the "
            "flag out, or train Pre-LN with --arch transformer."
        )
    if getattr(cfg, "scale_resids", False):
        raise AdminError(
            "scale_resids was given: a second learned scale on the shortcut that Admin scales already. Leave it out."
        )
    if cfg.base_layers:
        raise AdminError(
            f"--base-layers {cfg.base_layers} was given; BASE layers add their own shortcut. Leave it out."
        )
    for side, stack in (("encoder", cfg.encoder), ("decoder", cfg.decoder)):
        if stack.layers < 1:
            raise AdminError(f"--{side}-layers is {stack.layers}; at least 1 layer is needed.")
        if stack.layers_to_keep and "0" not in str(stack.layers_to_keep).split(","):
            raise AdminError(
                f"--{side}-layers-to-keep {stack.layers_to_keep} drops layer 0, whose first omega is fixed at the "
                "embedding. Keep layer 0."
            )
    if cfg.admin_init not in RULES:
        raise AdminError(f"--admin-init is {cfg.admin_init}; expected one of {', '.join(RULES)}.")
    if cfg.admin_profile_tokens < 1:
        raise AdminError(f"--admin-profile-tokens is {cfg.admin_profile_tokens}; at least 1 token is needed (8192).")
    if cfg.admin_max_skipped_updates < 0:
        raise AdminError(
            f"--admin-max-skipped-updates is {cfg.admin_max_skipped_updates}; expected 0 (never stop) or more (100)."
        )


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
        nested = _nested(cfg)
        _refuse_unsuitable(nested)
        return super().build_model(nested, task)

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
