"""Choose the fast modules from a model's options, and log once which stay plain."""

from __future__ import annotations

import logging
from typing import Any

import torch
from fairseq import optim
from torch import nn

from .attention import FastAttention
from .dropout import FastDropout
from .radam import FP16Optimizer
from .stacks import FastDecoder, FastEncoder

logger = logging.getLogger(__name__)

FAST = (FastEncoder, FastDecoder, FastAttention, FastDropout)
"""Each replaces modules whose type is exactly its second base class, the plain one."""


def obstacles(cfg: Any) -> list[str]:
    """The model's options that keep all layers plain."""
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
    """Whether the model gets fast modules."""
    return cfg.admin_fast != "off" and not obstacles(cfg)


def speed_up(model: nn.Module, cfg: Any, stacks: dict[str, Any]) -> None:
    """Replace a new model's modules by fast ones, or log the option that prevents it.

    Args:
        model: a new model.
        cfg: the options of the model.
        stacks: the model's encoder, its decoder or both, by name.
    """
    if not wanted(cfg):
        if cfg.admin_fast != "off":
            logger.info("Admin: --admin-fast: stock layers, for lack of faster ones with %s", ", ".join(obstacles(cfg)))
        return
    # From torch 2.11 scaled_dot_product_attention prefers cuDNN on H100, H200 and B200. cuDNN builds and keeps a plan
    # for every new combination of batch size and two lengths. Text has thousands of these. The switch acts on the whole
    # process.
    if torch.backends.cuda.cudnn_sdp_enabled():
        torch.backends.cuda.enable_cudnn_sdp(False)
        if torch.cuda.is_available():
            logger.info("Admin: cuDNN's attention is off: it makes a plan for every shape of batch")
    if cfg.admin_fast == "graph":
        logger.info("Admin: --admin-fast graph: --criterion label_smoothed_cross_entropy_fast records the steps")
    optim.FP16Optimizer = FP16Optimizer  # fairseq's trainer takes this name
    replacements: dict[type, type] = {kind.__bases__[1]: kind for kind in FAST}
    for stack in stacks.values():
        for module in stack.modules():
            module.__class__ = replacements.get(type(module), type(module))
