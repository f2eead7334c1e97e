"""Model options that a scheme cannot work with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fairseq.models.transformer import TransformerConfig

from ..errors import AdminError
from ..method.schemes import EVERY, FFN_LAWS, ON_TOP, SCHEMES
from .config import RULES


def layers_to_keep(stack: Any) -> list[int]:
    """The layers that --encoder-layers-to-keep or --decoder-layers-to-keep names; none: all stay. -1: not a number.

    Args:
        stack: the options of an encoder or a decoder.
    """
    given = stack.layers_to_keep.split(",") if stack.layers_to_keep else []
    return [int(number) if number.strip().isdecimal() else -1 for number in given]


def refuse_unsuitable(cfg: TransformerConfig, sides: Sequence[str] = ("encoder", "decoder")) -> None:
    """Refuse options under which a scheme is not what its source says.

    Args:
        cfg: a model's options.
        sides: the stacks that it has.

    Raises:
        AdminError: such an option was given.
    """
    if cfg.admin_scheme in ON_TOP:
        raise AdminError(
            f"--admin-scheme {cfg.admin_scheme} was given, which is for new layers on a pre-trained encoder alone. "
            f"Give --arch deeper_admin --more-layers 24 --more-scheme {cfg.admin_scheme}, or another --admin-scheme."
        )
    if cfg.admin_scheme not in SCHEMES:
        raise AdminError(f"--admin-scheme is {cfg.admin_scheme}; expected one of {', '.join(SCHEMES)}.")
    scheme = SCHEMES[cfg.admin_scheme]
    if not scheme.omega and cfg.admin_init != "reference":
        raise AdminError(
            f"--admin-init {cfg.admin_init} was given with --admin-scheme {cfg.admin_scheme}, which has no omega "
            "to set. Leave one of the two out."
        )
    if cfg.admin_ffn_init not in (None, *FFN_LAWS):
        raise AdminError(f"--admin-ffn-init is {cfg.admin_ffn_init}; expected one of {', '.join(FFN_LAWS)}.")
    if scheme.ffn is None and cfg.admin_ffn_init == "stock":
        raise AdminError(
            f"--admin-ffn-init stock was given with --admin-scheme {cfg.admin_scheme}, which draws its feed-forward "
            "weights itself, from Xavier's law. Leave one of the two out."
        )
    stacks = {side: getattr(cfg, side) for side in sides}
    if any(stack.normalize_before for stack in stacks.values()):
        flags = " or ".join(f"--{side}-normalize-before" for side in sides)
        raise AdminError(
            f"{flags} was given, and Admin is for Post-LN. Leave the flag out; for Pre-LN give --admin-scheme pre-ln."
        )
    if getattr(cfg, "scale_resids", False):
        raise AdminError(
            "scale_resids was given: a second learned scale on the shortcut that Admin scales already. Leave it out."
        )
    if scheme.branch_norm == "input" and cfg.cross_self_attention:
        raise AdminError(
            f"--cross-self-attention was given with --admin-scheme {cfg.admin_scheme}, which norms a self-attention's "
            "input and not the encoder's output in it. Leave one of the two out."
        )
    if scheme.second_stream and cfg.no_decoder_final_norm:
        raise AdminError(
            f"--no-decoder-final-norm was given with --admin-scheme {cfg.admin_scheme}, whose second stream ends in "
            "that norm. Leave one of the two out."
        )
    if cfg.base_layers:
        raise AdminError(
            f"--base-layers {cfg.base_layers} was given; BASE layers add their own shortcut. Leave it out."
        )
    for side, stack in stacks.items():
        if stack.layers < 1:
            raise AdminError(f"--{side}-layers is {stack.layers}; at least 1 layer is needed.")
        if stack.attention_heads < 1 or stack.embed_dim % stack.attention_heads:
            raise AdminError(
                f"--{side}-attention-heads is {stack.attention_heads}; expected a divisor of --{side}-embed-dim, "
                f"{stack.embed_dim}."
            )
        kept = layers_to_keep(stack)
        if len(set(kept)) < len(kept) or not set(range(stack.layers)).issuperset(kept):
            raise AdminError(
                f"--{side}-layers-to-keep is {stack.layers_to_keep}; expected different numbers from 0 to "
                f"{stack.layers - 1}, with commas between them."
            )
    if cfg.admin_init not in RULES:
        raise AdminError(f"--admin-init is {cfg.admin_init}; expected one of {', '.join(RULES)}.")
    if cfg.admin_profile_tokens < 1:
        raise AdminError(f"--admin-profile-tokens is {cfg.admin_profile_tokens}; at least 1 token is needed (8192).")
    if cfg.admin_max_skipped_updates < 0:
        raise AdminError(
            f"--admin-max-skipped-updates is {cfg.admin_max_skipped_updates}; expected 0 (never stop) or more (100)."
        )
    if cfg.admin_monitor < 0:
        raise AdminError(
            f"--admin-monitor is {cfg.admin_monitor}; expected 0 (omega alone) or a number of updates (100)."
        )


def refuse_new_layers(args: Any, task: Any) -> None:
    """Refuse options under which there are no new layers on a pre-trained encoder, or not those of a scheme.

    Args:
        args: those of `deeper_admin`.

    Raises:
        AdminError: such an option was given, or the task has no head.
    """
    if getattr(getattr(task, "cfg", None), "classification_head_name", None) is None:
        raise AdminError(
            f"--arch deeper_admin was given with {type(task).__name__}, which has no classification head. Give --task "
            "sentence_prediction, or --arch masked_lm_admin."
        )
    if args.more_layers < 0:
        raise AdminError(f"--more-layers is {args.more_layers}; expected 0 or more.")
    if not args.more_layers and args.more_scheme:
        raise AdminError(
            f"--more-scheme {args.more_scheme} was given with --more-layers 0, which adds no layer to have it. Give "
            "--more-layers 24, or leave --more-scheme out."
        )
    if args.more_layers and args.more_scheme is None:
        raise AdminError(
            f"--more-layers {args.more_layers} was given without --more-scheme. Give one of {', '.join(EVERY)}."
        )
    if args.more_scheme and args.more_scheme.startswith("t-fixup"):
        raise AdminError(
            f"--more-scheme {args.more_scheme} was given; its paper scales the embeddings too, which are pre-trained "
            "here. Give dt-fixup, which is made for this."
        )
    if not 0 <= args.pretrained_lr_factor < math.inf:
        raise AdminError(f"--pretrained-lr-factor is {args.pretrained_lr_factor}; expected 0 (frozen) or more.")
    if not 0 <= args.more_dropout < 1:
        raise AdminError(f"--more-dropout is {args.more_dropout}; expected 0 or more, and less than 1.")
    if args.profile_sentences < 0:
        raise AdminError(f"--profile-sentences is {args.profile_sentences}; expected 0 (all) or more.")
