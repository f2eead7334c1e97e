"""From the options of a model to its fast modules, and what stays plain said once."""

from __future__ import annotations

import logging
from typing import Any

import torch
from fairseq.modules import FairseqDropout, MultiheadAttention
from torch import nn

from ..method.layers import SchemeDecoderLayer, SchemeEncoderLayer
from ..method.stacks import AdminDecoder, AdminEncoder
from .attention import FastAttention
from .compiled import CompiledDecoderLayer, CompiledEncoderLayer, keep_graphs
from .dropout import FastDropout
from .linear import FASTER, FastLinear, ahead
from .plain import Fast
from .radam import FP16Optimizer
from .stacks import FastDecoder, FastEncoder

logger = logging.getLogger(__name__)

FAST = {MultiheadAttention: FastAttention, FairseqDropout: FastDropout}
"""What replaces modules of just these types."""
COMPILED: dict[type, type] = {SchemeEncoderLayer: CompiledEncoderLayer, SchemeDecoderLayer: CompiledDecoderLayer}
"""And with --admin-fast compile."""


def obstacles(cfg: Any) -> list[str]:
    """The options given under which all layers stay plain."""
    options = {
        "--quant-noise-pq": cfg.quant_noise.pq,
        "--quant-noise-scalar": cfg.quant_noise.scalar,
        "--cross-self-attention": cfg.cross_self_attention,
        "--scale-heads": getattr(cfg, "scale_heads", False),
        "--encoder-xformers-att-config": cfg.encoder.xformers_att_config,
        "--decoder-xformers-att-config": cfg.decoder.xformers_att_config,
    }
    return [option for option, value in options.items() if value]


def wanted(cfg: Any) -> bool:
    """Whether a model is to have fast modules."""
    return cfg.admin_fast != "off" and not obstacles(cfg)


def encoder_class(cfg: Any) -> type[AdminEncoder]:
    """The encoder for a model's options."""
    return FastEncoder if wanted(cfg) else AdminEncoder


def decoder_class(cfg: Any) -> type[AdminDecoder]:
    """The decoder for a model's options."""
    return FastDecoder if wanted(cfg) else AdminDecoder


def avoid_cudnn_attention() -> None:
    """Switch cuDNN's attention off in this process, stock attention included.

    From torch 2.11 scaled_dot_product_attention prefers it on H100, H200 and B200, where it builds a plan for every
    new batch size and pair of lengths, and keeps it: of text, some thousands.
    """
    if torch.backends.cuda.cudnn_sdp_enabled():
        torch.backends.cuda.enable_cudnn_sdp(False)
        if torch.cuda.is_available():
            logger.info("Admin: cuDNN's attention is off, which makes a plan for every shape of batch")


def speed_up(model: nn.Module, cfg: Any, stacks: dict[str, Any]) -> None:
    """Turn the modules of a model, just made, into fast ones, or say why not, with the option's name.

    Args:
        stacks: those of its encoder and decoder that it has.
    """
    if not wanted(cfg):
        if cfg.admin_fast != "off":
            logger.info("Admin: --admin-fast: stock layers, for %s has no faster ones", ", ".join(obstacles(cfg)))
        return
    avoid_cudnn_attention()
    FP16Optimizer.offer()
    fast: dict[type, type] = dict(FAST)
    compile = cfg.admin_fast == "compile"
    if compile:
        keep_graphs(cfg.save_dir)
        if cfg.checkpoint_activations:  # torch may compute a layer again by another of its graphs, and then stops
            logger.info("Admin: --admin-fast compile: the loss alone, for --checkpoint-activations was given")
        else:
            fast.update(COMPILED)
    elif not torch.cuda.is_available() and ahead() >= FASTER:
        logger.info("Admin: --admin-fast: linear layers through oneDNN, %.1f times as fast as MKL on this CPU", ahead())
        fast[nn.Linear] = FastLinear
    for stack in stacks.values():
        projection = getattr(stack, "output_projection", None)  # its logits are too large for oneDNN's copies
        for module in stack.modules():
            if module is not projection:
                module.__class__ = fast.get(type(module), type(module))
            if compile and isinstance(module, Fast):
                module.gpu_code = True
