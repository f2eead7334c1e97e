"""From the options of a model to its fast modules, and what stays stock said once."""

from __future__ import annotations

import logging
from typing import Any

import torch
from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase
from fairseq.modules import FairseqDropout, MultiheadAttention
from torch import nn

from ..method.schemes import attentions_of, layers_of
from ..method.stacks import AdminDecoder, AdminEncoder
from .attention import FastAttention
from .dropout import FastDropout
from .feed_forward import fuse
from .linear import FASTER, SMALLEST, FastLinear, ahead
from .shortcut import Shared, fuse_norms
from .stacks import FastDecoder, FastEncoder

logger = logging.getLogger(__name__)


def obstacles(cfg: Any) -> list[str]:
    """The options given under which all layers stay stock."""
    found = {
        "--quant-noise-pq": cfg.quant_noise.pq,
        "--quant-noise-scalar": cfg.quant_noise.scalar,
        "--cross-self-attention": cfg.cross_self_attention,
        "--encoder-xformers-att-config": cfg.encoder.xformers_att_config,
        "--decoder-xformers-att-config": cfg.decoder.xformers_att_config,
    }
    return [option for option, value in found.items() if value]


def wanted(cfg: Any) -> bool:
    """Whether a model is to have fast modules."""
    return cfg.admin_fast == "on" and not obstacles(cfg)


def encoder_class(cfg: Any) -> type[AdminEncoder]:
    """The encoder for a model's options."""
    return FastEncoder if wanted(cfg) else AdminEncoder


def decoder_class(cfg: Any) -> type[AdminDecoder]:
    """The decoder for a model's options."""
    return FastDecoder if wanted(cfg) else AdminDecoder


def _speed_up_stack(stack: TransformerEncoderBase | TransformerDecoderBase) -> bool:
    """Returns whether the feed-forward layers are fast, too."""
    fused, shared = True, Shared()
    for layer in layers_of(stack):
        layer.need_attn = False  # in validation: of all layers but the one whose weights the decoder returns
        for attention in attentions_of(layer):
            assert type(attention) is MultiheadAttention
            attention.__class__ = FastAttention
            attention.put_together()
        fused = fuse(layer, shared) and fused
        if type(layer.fc1) is nn.Linear:
            layer.fc1.__class__ = FastLinear
        fuse_norms(layer, shared)
    stack.shared = shared  # type: ignore[assignment]
    for module in stack.modules():
        if type(module) is FairseqDropout:
            module.__class__ = FastDropout
    return fused


def _use_onednn(model: nn.Module, width: int, ffn: int) -> None:
    if torch.cuda.is_available() or width * ffn < SMALLEST:
        return
    ratio = ahead()
    if ratio < FASTER:
        return
    logger.info("Admin: --admin-fast: linear layers through oneDNN, %.1f times as fast as MKL on this CPU", ratio)
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FastLinear
        if isinstance(module, (FastLinear, FastAttention)):
            module.onednn = True


def speed_up(model: nn.Module, cfg: Any, stacks: dict[str, Any]) -> None:
    """Turn the modules of a model, just made, into fast ones, and say what is not, with the option's name.

    Args:
        stacks: those of its encoder and decoder that it has.
    """
    if cfg.admin_fast != "on":
        return
    if not wanted(cfg):
        logger.info("Admin: --admin-fast: stock layers, for %s has no faster ones", ", ".join(obstacles(cfg)))
        return
    if not all([_speed_up_stack(stack) for stack in stacks.values()]):
        logger.info(
            "Admin: --admin-fast: stock feed-forward layers, for --activation-fn %s has no faster ones",
            cfg.activation_fn,
        )
    side = cfg.encoder if "encoder" in stacks else cfg.decoder
    _use_onednn(model, side.embed_dim, side.ffn_embed_dim)
