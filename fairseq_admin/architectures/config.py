"""The options of our models: fairseq's own and Admin's, with sizes filled in."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from typing import Any, List, Optional, Type

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models.roberta.model import base_architecture
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from omegaconf import II, OmegaConf

from ..method.schemes import EVERY, FFN_LAWS, RULES, SIDES

SIZES = ("input_dim", "output_dim", "embed_dim", "ffn_embed_dim", "layers", "attention_heads")
"""The sizes of a stack, as fairseq calls them."""


def _flat(config: Type[FairseqDataclass]) -> Type[FairseqDataclass]:
    """fairseq's options as one flat dataclass: the encoder.layers of its TransformerConfig becomes encoder_layers.

    fairseq turns command-line options into a registered dataclass only where the names match, and they are flat. Sizes
    have no default here: an --arch preset, or else the base preset, fills in those that were not given. (With fairseq's
    512 as input and output dimension, a narrower language model would get two projections that nobody asked for.)
    """
    flat = []
    for outer in fields(config):
        inner = outer.default if outer.name in (*SIDES, "quant_noise") else None
        for item in fields(inner) if inner is not None else [outer]:  # type: ignore[arg-type]
            name = f"{outer.name}_{item.name}" if inner is not None else item.name
            metadata, kind, default, factory = dict(item.metadata), item.type, item.default, item.default_factory
            side, _, size = name.partition("_")
            if item.name.startswith("_"):
                continue
            if inner is not None and "help" in metadata:
                metadata["help"] = f"{outer.name}: {metadata['help']}"
            if side in SIDES and size in SIZES:
                kind, default = Optional[int], None
            elif item.name == "layers_to_keep":
                kind = Optional[str]  # fairseq splits it at commas
            holder: Any = field(default=default, default_factory=factory, metadata=metadata)  # type: ignore[arg-type]
            flat.append((name, kind, holder))
    return make_dataclass(f"Flat{config.__name__}", flat, bases=(FairseqDataclass,))


OUTSIDE = {"update_freq": [1], "log_interval": 100}
"""fairseq's options that are not a model's, with fairseq's defaults."""


@dataclass
class AdminOptions(FairseqDataclass):
    """Admin's own options, which every model has."""

    admin_scheme: ChoiceEnum(tuple(EVERY)) = field(  # type: ignore[valid-type]
        default="admin",
        metadata={"help": "what is done with norm, shortcut, branch and initial weights (the table in schemes.py)"},
    )
    admin_init: ChoiceEnum(RULES) = field(  # type: ignore[valid-type]
        default="reference",
        metadata={
            "help": "how the shortcut scales omega are set: from the first training batch as the authors' code does "
            "(reference) or as the paper says (paper), or from the depth alone (log, constant)"
        },
    )
    admin_ffn_init: Optional[ChoiceEnum(FFN_LAWS)] = field(  # type: ignore[valid-type]
        default=None,
        metadata={
            "help": "initial feed-forward weights: Xavier-uniform with zero bias, as in the papers' fairseq (xavier), "
            "or as in today's (stock); not given: as the scheme's row of the table says"
        },
    )
    admin_profile_tokens: int = field(
        default=8192,
        metadata={"help": "profile on at most this many tokens of the first training batch, padding included"},
    )
    admin_max_skipped_updates: int = field(
        default=100,
        metadata={"help": "stop training after this many updates skipped in a row (overflow, OOM); 0: never"},
    )
    admin_fast: ChoiceEnum(("on", "off")) = field(  # type: ignore[valid-type]
        default="on",
        metadata={"help": "faster layers that compute the same (off: fairseq's own, to compare)"},
    )
    admin_monitor: int = field(
        default=0,
        metadata={
            "help": "once in so many updates, log the branches' share and variance and the gradient's norm by stack, "
            "and look for signs of divergence (0: only omega, once an interval of the log)"
        },
    )
    update_freq: List[int] = II("optimization.update_freq")
    log_interval: int = II("common.log_interval")


@dataclass
class TransformerAdminConfig(AdminOptions, _flat(TransformerConfig)):  # type: ignore[misc]
    """Every option of fairseq's Transformer, and Admin's own."""


@dataclass
class TransformerLMAdminConfig(AdminOptions, _flat(TransformerLanguageModelConfig)):  # type: ignore[misc]
    """Every option of fairseq's `transformer_lm`, and Admin's own."""


@dataclass
class DeeperOptions(FairseqDataclass):
    """What `deeper_admin` adds. The encoder's rate, and no dropout in the new layers: as in DT-Fixup."""

    more_layers: int = field(default=0, metadata={"help": "new layers on top of the encoder"})
    more_scheme: Optional[ChoiceEnum(tuple(EVERY))] = field(  # type: ignore[valid-type]
        default=None, metadata={"help": "the new layers' residual scheme"}
    )
    more_dropout: float = field(default=0.0, metadata={"help": "dropout of every kind in the new layers"})
    pretrained_lr_factor: float = field(
        default=0.008,
        metadata={
            "help": "what the encoder's learning rate is multiplied by; 0: it is frozen, 1: any optimizer will do"
        },
    )
    profile_sentences: int = field(
        default=0,
        metadata={
            "help": "look at so many sentences of the training set for DT-Fixup's largest norm (0: at all of them)"
        },
    )


def fill(args: Any, **defaults: Any) -> None:
    """Set every option that was not given."""
    for name, value in defaults.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)


def _fill_stack(args: Any, side: str, layers: int, embed_dim: int, ffn_embed_dim: int, attention_heads: int) -> None:
    sizes = {"layers": layers, "embed_dim": embed_dim, "ffn_embed_dim": ffn_embed_dim}
    fill(args, **{f"{side}_{name}": size for name, size in {**sizes, "attention_heads": attention_heads}.items()})


def fill_sizes(
    args: Any,
    encoder_layers: int = 6,
    decoder_layers: int = 6,
    embed_dim: int = 512,
    ffn_embed_dim: int = 2048,
    attention_heads: int = 8,
) -> None:
    """Set every size not given to the preset's value; a decoder width not given follows the encoder's."""
    _fill_stack(args, "encoder", encoder_layers, embed_dim, ffn_embed_dim, attention_heads)
    fill_decoder(args, decoder_layers, args.encoder_embed_dim, args.encoder_ffn_embed_dim, attention_heads)


def fill_decoder(
    args: Any, layers: int = 6, embed_dim: int = 512, ffn_embed_dim: int = 2048, attention_heads: int = 8
) -> None:
    """Set every size of a decoder not given to the preset's value; widths not given follow the embedding's."""
    _fill_stack(args, "decoder", layers, embed_dim, ffn_embed_dim, attention_heads)
    fill(args, decoder_input_dim=args.decoder_embed_dim, decoder_output_dim=args.decoder_embed_dim)


def fill_masked(
    args: Any, layers: int = 12, embed_dim: int = 768, ffn_embed_dim: int = 3072, attention_heads: int = 12
) -> None:
    """Set every option of a masked language model not given to the preset's value, or else RoBERTa's."""
    _fill_stack(args, "encoder", layers, embed_dim, ffn_embed_dim, attention_heads)
    _fill_admin(args)
    if args.admin_scheme == "pre-ln":
        fill(args, layernorm_embedding=False)  # as fairseq's roberta_prenorm
    base_architecture(args)


def _fill_admin(args: Any) -> None:
    """Defaults for Admin's own options, which an older checkpoint, or a Namespace made by hand, lacks."""
    fill(args, **{option.name: OUTSIDE.get(option.name, option.default) for option in fields(AdminOptions)})


def _copied(cfg: Any) -> Namespace:
    """A copy of the options, whatever holds them."""
    flat: Any = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True) if OmegaConf.is_config(cfg) else vars(cfg)
    args = Namespace(**flat)
    _fill_admin(args)
    if getattr(args, "offload_activations", False):  # as fairseq's presets do: inputs are offloaded to be computed from
        args.checkpoint_activations = True
    return args


def flat_translation(cfg: Any) -> Namespace:
    """The options of a translation model, complete, with Admin's next to them."""
    args = _copied(cfg)
    fill_sizes(args)
    return args


def flat_decoder(cfg: Any) -> Namespace:
    """The options of a language model as fairseq's `transformer_lm` reads them, complete, with Admin's next to them."""
    args = _copied(cfg)
    fill_decoder(args)
    for option in fields(TransformerLMAdminConfig):
        # Leave out those that come from the task and the trainer (add_bos_token, update_freq, ...).
        if option.default is not MISSING and not str(option.default).startswith("${"):
            fill(args, **{option.name: option.default})
    return args


def flat_encoder(cfg: Any, task: Any) -> Namespace:
    """The options of a masked language model as fairseq's RoBERTa reads them, complete, with Admin's next to them."""
    args = _copied(cfg)
    fill_masked(args)
    fill(args, tokens_per_sample=task.max_positions())
    fill(args, max_positions=args.tokens_per_sample)
    return args


def nested(args: Namespace, sides: Sequence[str] = SIDES) -> TransformerConfig:
    """Complete options as fairseq's own layers read them, of a model with these stacks."""
    cfg = TransformerConfig.from_namespace(args)
    for side in set(SIDES) - set(sides):
        getattr(cfg, side).layers = 0
    return cfg
