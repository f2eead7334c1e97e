"""Refuse options that do not work with a scheme, or with new layers on an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fairseq.models.transformer import TransformerConfig

from ..errors import AdminError
from ..method.schemes import FFN_LAWS, MODEL_SCHEMES, RULES, SCHEMES, SIDES, is_number
from .config import SPEEDS

CHOICES = {
    "admin_scheme": MODEL_SCHEMES, "admin_init": RULES, "admin_ffn_init": (None, *FFN_LAWS), "admin_fast": SPEEDS
}  # fmt: skip
"""fairseq-train checks all but the second; for a Namespace made by hand, or RoBERTa under hydra, it checks none."""

LEAST = {"admin_profile_tokens": 1, "admin_max_skipped_updates": 0, "admin_monitor": 0}
LEAST |= dict.fromkeys(("more_layers", "profile_sentences", "pretrained_lr_factor"), 0)  # of `deeper_admin` alone


def layers_to_keep(stack: Any) -> list[int]:
    """The layers that --encoder-layers-to-keep or --decoder-layers-to-keep names.

    Args:
        stack: the options of an encoder or a decoder.

    Returns:
        Numbers from 0, with -1 for anything that is not a number. Empty: all layers stay.
    """
    numbers = stack.layers_to_keep.split(",") if stack.layers_to_keep else []
    return [int(number) if number.strip().isdecimal() else -1 for number in numbers]


def refuse_unsuitable(cfg: TransformerConfig, sides: Sequence[str] = SIDES) -> None:
    """Refuse options that have no effect on a scheme, or that would make the scheme differ from its source.

    Args:
        cfg: a model's options.
        sides: the model's stacks.

    Raises:
        AdminError: such an option is set.
    """
    name = cfg.admin_scheme
    if name in SCHEMES and SCHEMES[name].new_layers_only:
        raise AdminError(
            f"--admin-scheme {name} is only for new layers on a pre-trained encoder. Give --arch "
            f"deeper_admin --more-layers 24 --more-scheme {name}, or another --admin-scheme."
        )
    for option, choices in CHOICES.items():
        number = option == "admin_init" and is_number(cfg.admin_init)
        if getattr(cfg, option) not in choices and not number:
            expected = ", ".join(filter(None, choices)) + " or a number above 0" * (option == "admin_init")
            raise AdminError(f"{_flag(option)} is {getattr(cfg, option)}; expected one of {expected}.")
    for option, least in LEAST.items():
        if getattr(cfg, option, least) < least:
            raise AdminError(f"{_flag(option)} is {getattr(cfg, option)}; expected at least {least}.")
    scheme, clash = SCHEMES[name], None
    more_scheme = getattr(cfg, "more_scheme", None) or name
    if not (scheme.omega or SCHEMES[more_scheme].omega) and cfg.admin_init != "reference":
        clash = f"--admin-init {cfg.admin_init}", "has no omega to set"
    elif scheme.ffn is None and cfg.admin_ffn_init == "stock":
        clash = "--admin-ffn-init stock", "draws its feed-forward weights itself, from Xavier's law"
    elif scheme.branch_norm == "input" and cfg.cross_self_attention:
        clash = "--cross-self-attention", "does not norm the encoder's output, only a self-attention's input"
    elif name == "keel" and cfg.no_cross_attention:
        clash = "--no-cross-attention", "counts three sub-layers in each decoder layer"
    if clash:
        raise AdminError(f"{clash[0]} was given with --admin-scheme {name}, which {clash[1]}. Leave one of them out.")
    if getattr(cfg, "scale_resids", False) or cfg.base_layers:
        option = "scale_resids" if cfg.base_layers == 0 else f"--base-layers {cfg.base_layers}"
        raise AdminError(f"{option} was given; it changes the shortcuts of the scheme. Leave it out.")
    for side in sides:
        stack = getattr(cfg, side)
        if scheme.omega and stack.layers < 1:
            raise AdminError(f"--{side}-layers is {stack.layers}; Admin needs 1 or more. Give another --admin-scheme.")
        if stack.normalize_before:
            raise AdminError(
                f"--{side}-normalize-before was given, and Admin is for Post-LN. Leave the flag out; for Pre-LN give "
                "--admin-scheme pre-ln."
            )
        kept = layers_to_keep(stack)
        if len(set(kept)) < len(kept) or not set(range(stack.layers)).issuperset(kept):
            raise AdminError(
                f"--{side}-layers-to-keep is {stack.layers_to_keep}; expected different numbers from 0 to "
                f"{stack.layers - 1}, with commas between them."
            )


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def refuse_new_layers(args: Any, task: object) -> None:
    """Refuse options that do not work with new layers on a pre-trained encoder.

    Args:
        args: the options of `deeper_admin`.
        task: fairseq's task.

    Raises:
        AdminError: such an option is set, or the task has no head.
    """
    if getattr(getattr(task, "cfg", None), "classification_head_name", None) is None:
        raise AdminError(
            f"--arch deeper_admin was given with {type(task).__name__}, which has no classification head. Give --task "
            "sentence_prediction, or --arch masked_lm_admin."
        )
    if bool(args.more_layers) != bool(args.more_scheme):
        raise AdminError(
            f"--more-layers is {args.more_layers} and --more-scheme {args.more_scheme}; expected both or neither. Give "
            f"--more-layers 24 and one of {', '.join(SCHEMES)}, or leave both out."
        )
