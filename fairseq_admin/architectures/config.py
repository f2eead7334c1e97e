"""The options of our models, those of fairseq and those of Admin, and the default sizes of the models."""

import contextlib
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from enum import Enum
from typing import Any, List, Optional, Type, TypeAlias

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models.roberta.model import base_architecture
from fairseq.models.transformer import DEFAULT_MAX_SOURCE_POSITIONS, DEFAULT_MAX_TARGET_POSITIONS, TransformerConfig
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from fairseq.tasks import FairseqTask
from omegaconf import II, DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, InterpolationKeyError, MissingMandatoryValue

from ..method.schemes import FFN_LAWS, SCHEMES, SIDES

SIZES = ("input_dim", "output_dim", "embed_dim", "ffn_embed_dim", "layers", "attention_heads")
"""The sizes of a stack, as fairseq calls them."""


def _flat(config: Type[FairseqDataclass]) -> Type[FairseqDataclass]:
    """Flatten fairseq's options into one dataclass: encoder.layers of its TransformerConfig becomes encoder_layers.

    fairseq turns command-line options into a registered dataclass by name, and the command line's names are flat. Sizes
    have no default here: the --arch preset fills them in. (With fairseq's default of 512 for the input and output
    dimension, a narrower language model would get two unwanted projections.)
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


SPEEDS = ("on", "off", "graph")
"""The choices of --admin-fast."""

OUTSIDE = {"update_freq": [1], "log_interval": 100}
"""Options of fairseq's trainer that our models read, with fairseq's defaults."""


def _option(default: Any, text: str) -> Any:
    """An option of the command line: its default and its help."""
    return field(default=default, metadata={"help": text})


@dataclass
class AdminOptions(FairseqDataclass):
    """Admin's options, for every model."""

    admin_scheme: ChoiceEnum(tuple(SCHEMES)) = _option(  # type: ignore[valid-type]
        "admin", "the residual scheme: norm, shortcut, branch and initial weights (the table in schemes.py)"
    )
    admin_init: str = _option(
        "reference",
        "rule that sets the shortcut scales omega: from the first training batch as the authors' code does (reference) "
        "or as the paper says (paper), from the depth alone (log, constant, linear), or a number",
    )
    admin_ffn_init: Optional[ChoiceEnum(FFN_LAWS)] = _option(  # type: ignore[valid-type]
        None,
        "initial feed-forward weights: Xavier-uniform with zero bias, as in the papers' fairseq (xavier), or as in "
        "today's (stock); default: by the scheme's row of the table",
    )
    admin_profile_tokens: int = _option(
        8192, "profile on at most this many tokens of the first training batch, padding included"
    )
    admin_max_skipped_updates: int = _option(
        100, "stop training after this many updates skipped in a row (overflow, OOM); 0: never"
    )
    admin_fast: ChoiceEnum(SPEEDS) = _option(  # type: ignore[valid-type]
        "on",
        "faster layers that compute the same (off: fairseq's own, to compare; graph: on one GPU, replay the steps of "
        "label_smoothed_cross_entropy_fast as CUDA graphs)",
    )
    admin_monitor: int = _option(
        0,
        "every N updates, log the branches' share and variance and the gradient's norm by stack, and warn of signs of "
        "divergence (0: only omega, once an interval of the log)",
    )
    update_freq: List[int] = II("optimization.update_freq")
    log_interval: int = II("common.log_interval")


@dataclass
class TransformerAdminConfig(AdminOptions, _flat(TransformerConfig)):  # type: ignore[misc]
    """Every option of fairseq's Transformer, and every option of Admin."""


@dataclass
class TransformerLMAdminConfig(AdminOptions, _flat(TransformerLanguageModelConfig)):  # type: ignore[misc]
    """Every option of fairseq's `transformer_lm`, and every option of Admin."""


@dataclass
class NewLayersOptions(FairseqDataclass):
    """The options of `deeper_admin`.

    Two defaults are those of DT-Fixup: the factor of the encoder's learning rate, and no dropout in the new layers.
    """

    more_layers: int = _option(0, "new layers on top of the encoder")
    more_scheme: Optional[ChoiceEnum(tuple(SCHEMES))] = _option(  # type: ignore[valid-type]
        None, "the new layers' residual scheme"
    )
    more_dropout: float = _option(0.0, "dropout of every kind in the new layers")
    pretrained_lr_factor: float = _option(
        0.008, "factor of the encoder's learning rate; 0: the encoder is frozen, 1: any optimizer works"
    )
    profile_sentences: int = _option(
        0, "number of training sentences on which DT-Fixup's largest norm is measured (0: all)"
    )


ModelOptions: TypeAlias = Namespace | DictConfig | FairseqDataclass
"""Options of a model, as fairseq and its tasks give them."""


def fill(args: Namespace | DictConfig, **defaults: object) -> None:
    """Set every option of `args` that is missing or None, in place.

    Args:
        args: options.
        defaults: their values by name.
    """
    for name, value in defaults.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)


TRANSFORMER = {"layers": 6, "embed_dim": 512, "ffn_embed_dim": 2048, "attention_heads": 8}
"""The sizes of a stack of fairseq's `transformer` and `transformer_lm`."""
ROBERTA = {"layers": 12, "embed_dim": 768, "ffn_embed_dim": 3072, "attention_heads": 12}


def _fill_stack(args: Namespace, side: str, sizes: Mapping[str, int]) -> None:
    fill(args, **{f"{side}_{name}": size for name, size in sizes.items()})


def fill_sizes(
    args: Namespace, encoder_layers: int | None = None, decoder_layers: int | None = None, **sizes: int
) -> None:
    """Set every missing size of a translation model, in place. A missing decoder width becomes equal to the encoder's.

    The longest inputs are sizes, too: a task whose options are the model's reads them (online_backtranslation).

    Args:
        args: options.
        encoder_layers, decoder_layers: the preset's depths, if they differ.
        sizes: the preset's other sizes that differ from `TRANSFORMER`, of both stacks.
    """
    fill(args, encoder_layers=encoder_layers, decoder_layers=decoder_layers)
    fill(args, max_source_positions=DEFAULT_MAX_SOURCE_POSITIONS, max_target_positions=DEFAULT_MAX_TARGET_POSITIONS)
    _fill_stack(args, "encoder", {**TRANSFORMER, **sizes})
    widths = {"embed_dim": args.encoder_embed_dim, "ffn_embed_dim": args.encoder_ffn_embed_dim}
    fill_decoder(args, **{**sizes, **widths})


def fill_decoder(args: Namespace, **sizes: int) -> None:
    """Set every missing size of a decoder, in place. Missing input and output widths become equal to the embedding's.

    Args:
        args: options.
        sizes: the preset's sizes that differ from `TRANSFORMER`.
    """
    _fill_stack(args, "decoder", {**TRANSFORMER, **sizes})
    fill(args, decoder_input_dim=args.decoder_embed_dim, decoder_output_dim=args.decoder_embed_dim)


def fill_masked(args: Namespace, **sizes: int) -> None:
    """Set every missing option of a masked language model, in place: to the preset's value or RoBERTa's value.

    Args:
        args: options.
        sizes: the preset's sizes that differ from `ROBERTA`.
    """
    _fill_stack(args, "encoder", {**ROBERTA, **sizes})
    _fill_admin(args)
    if args.admin_scheme == "pre-ln":
        fill(args, layernorm_embedding=False)  # as fairseq's roberta_prenorm
    base_architecture(args)


def _fill_admin(args: Namespace | DictConfig) -> None:
    """Set missing options of Admin: an older checkpoint, or a Namespace made by hand, lacks some.

    With hydra, the options of a model without a dataclass, as RoBERTa's, lack those of the trainer.
    """
    if isinstance(args, DictConfig):
        with contextlib.suppress(ConfigKeyError):  # they have no parent
            fill(args, update_freq=OmegaConf.select(args, "..optimization.update_freq"))
            fill(args, log_interval=OmegaConf.select(args, "..common.log_interval"))
    fill(args, **{option.name: OUTSIDE.get(option.name, option.default) for option in fields(AdminOptions)})


def plain_options(section: Any) -> dict[str, Any]:
    """Copy options as plain values.

    Args:
        section: a Namespace, a dataclass, a config of omegaconf's, a mapping, or None.

    Returns:
        A new dict; empty for None. An option that stands for another section's ("${optimization.update_freq}") is left
        out if that section is not there.
    """
    if isinstance(section, Namespace):
        return dict(vars(section))
    if is_dataclass(section):
        return {name: value for name, value in vars(section).items() if not str(value).startswith("${")}
    if not OmegaConf.is_config(section):
        return dict(section or {})
    options = {}
    for name in section:
        with contextlib.suppress(InterpolationKeyError, MissingMandatoryValue):
            options[name] = _plain(section[name])
    return options


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if OmegaConf.is_dict(value):
        return plain_options(value)
    return OmegaConf.to_container(value, resolve=True, enum_to_str=True) if OmegaConf.is_list(value) else value


def _copied(cfg: ModelOptions) -> Namespace:
    options = plain_options(cfg)
    for group in (*SIDES, "quant_noise"):  # those of fairseq's TransformerConfig are nested
        inner = plain_options(options.pop(group, None))
        options |= {f"{group}_{name}": value for name, value in inner.items()}
    args = Namespace(**options)
    _fill_admin(args)
    if getattr(args, "offload_activations", False):  # as in fairseq's presets: only recomputation uses offloaded inputs
        args.checkpoint_activations = True
    return args


def flat_translation(cfg: ModelOptions) -> Namespace:
    """Complete the options of a translation model.

    Args:
        cfg: a Namespace, DictConfig or dataclass, left unchanged.

    Returns:
        The completed copy.
    """
    args = _copied(cfg)
    fill_sizes(args)
    return args


def flat_decoder(cfg: ModelOptions) -> Namespace:
    """Complete the options of a language model, as fairseq's `transformer_lm` reads them.

    Args:
        cfg: a Namespace, DictConfig or dataclass, left unchanged.

    Returns:
        The completed copy.
    """
    args = _copied(cfg)
    fill_decoder(args)
    for option in fields(TransformerLMAdminConfig):
        # Skip those that come from the task and the trainer (add_bos_token, update_freq, ...).
        if option.default is not MISSING and not str(option.default).startswith("${"):
            fill(args, **{option.name: option.default})
    return args


def flat_encoder(cfg: ModelOptions, task: FairseqTask) -> Namespace:
    """Complete the options of a masked language model, as fairseq's RoBERTa reads them.

    Args:
        cfg: a Namespace, DictConfig or dataclass, left unchanged.
        task: fairseq's task, which knows the longest input.

    Returns:
        The completed copy.
    """
    args = _copied(cfg)
    fill_masked(args)
    fill(args, tokens_per_sample=task.max_positions())
    fill(args, max_positions=args.tokens_per_sample)
    return args


def nested(args: Namespace, sides: Sequence[str] = SIDES) -> TransformerConfig:
    """Nest complete options as fairseq's layers read them.

    Args:
        args: flat options.
        sides: the stacks that the model has. The other stack gets 0 layers.

    Returns:
        The options in fairseq's groups, with the options of Admin.
    """
    cfg = TransformerConfig.from_namespace(args)
    for side in set(SIDES) - set(sides):
        getattr(cfg, side).layers = 0
    return cfg
