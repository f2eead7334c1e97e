"""From the options of a model to its fast modules, and what stays plain said once."""

from __future__ import annotations

import logging
from typing import Any

import torch
from fairseq import optim
from torch import nn

from .attention import FastAttention
from .compiled import CompiledDecoderLayer, CompiledEncoderLayer, keep_graphs
from .dropout import FastDropout
from .linear import FASTER, FastLinear, ahead
from .plain import Fast
from .radam import FP16Optimizer
from .stacks import FastDecoder, FastEncoder

logger = logging.getLogger(__name__)

FAST = (FastEncoder, FastDecoder, FastAttention, FastDropout)
"""Each replaces modules of just the type of its second base, the plain one."""
COMPILED = (CompiledEncoderLayer, CompiledDecoderLayer)
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


def speed_up(model: nn.Module, cfg: Any, stacks: dict[str, Any]) -> None:
    """Turn the modules of a model, just made, into fast ones, or say why not, with the option's name.

    Args:
        stacks: those of its encoder and decoder that it has.
    """
    if not wanted(cfg):
        if cfg.admin_fast != "off":
            logger.info("Admin: --admin-fast: stock layers, for %s has no faster ones", ", ".join(obstacles(cfg)))
        return
    # From torch 2.11 scaled_dot_product_attention prefers cuDNN's on H100, H200 and B200, where it builds a plan for
    # every new batch size and pair of lengths, and keeps it: of text, some thousands. The switch is the process's.
    if torch.backends.cuda.cudnn_sdp_enabled():
        torch.backends.cuda.enable_cudnn_sdp(False)
        if torch.cuda.is_available():
            logger.info("Admin: cuDNN's attention is off, which makes a plan for every shape of batch")
    optim.FP16Optimizer = FP16Optimizer  # which fairseq's trainer takes, and asks no one
    fast: list[type] = list(FAST)
    compile = cfg.admin_fast == "compile"
    if compile:
        keep_graphs(cfg.save_dir)
        if cfg.offload_activations:  # torch cannot compile a layer that moves what it keeps to the CPU
            logger.info("Admin: --admin-fast compile: the loss alone, because of --offload-activations")
        else:
            fast += COMPILED
    elif not torch.cuda.is_available() and ahead() >= FASTER:
        logger.info("Admin: --admin-fast: linear layers through oneDNN, %.1f times as fast as MKL on this CPU", ahead())
        fast.append(FastLinear)
    replacements = {kind.__bases__[1]: kind for kind in fast}
    for stack in stacks.values():
        projection = getattr(stack, "output_projection", None)  # its logits are too large for oneDNN's copies
        for module in stack.modules():
            if module is not projection:
                module.__class__ = replacements.get(type(module), type(module))
            if compile and isinstance(module, Fast):
                module.gpu_code = True
