"""Rename checkpoints of the authors' own code to today's names.

LiyuanLucasLiu/Transformer-Clinic, fairseq/modules/transformer_layer.py at 70f72b7, is a fork of fairseq 0.8;
namisan/exdeep-nmt has the same names. There ω is a parameter of the layer, `*_ratio_change`, one for each norm, and q,
k and v are one matrix. That code also trains the first ω of a stack; here it keeps the value that training reached.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping

import torch
from torch import Tensor

from . import provenance
from .state_dict import FIRST_DELTA, OMEGA_DELTA, OMEGA_INIT

NORMS = {"attention": "self_attn", "self": "self_attn", "encoder": "encoder_attn", "fc": "final"}
"""The norm of an ω, by the first part of the ω's name."""

OPTIONS = {"arch": "transformer_admin", "admin_scheme": "admin"}
"""Options that replace those of a converted checkpoint. The checkpoint's other options stay."""

RATIO = re.compile(rf"(.+)\.({'|'.join(NORMS)})_ratio_change")
PACKED = re.compile(r"(.+)\.in_proj_(weight|bias)")


def rename(weights: MutableMapping[str, Tensor]) -> bool:
    """Rename the entries of a state dict of the authors' code, in place.

    Args:
        weights: a state dict. If it is not from the authors' code, it stays unchanged.

    Returns:
        Whether the state dict was from the authors' code.
    """
    if not any(RATIO.fullmatch(key) for key in weights):
        return False
    for key in list(weights):
        if ratio := RATIO.fullmatch(key):
            norm = f"{ratio[1]}.{NORMS[ratio[2]]}_layer_norm"
            weights[norm + OMEGA_INIT] = weights.pop(key)
            if not f"{norm}{OMEGA_DELTA}".endswith(FIRST_DELTA):
                weights[norm + OMEGA_DELTA] = torch.zeros_like(weights[norm + OMEGA_INIT])
        elif packed := PACKED.fullmatch(key):
            for projection, part in zip("qkv", weights.pop(key).chunk(3)):
                weights[f"{packed[1]}.{projection}_proj.{packed[2]}"] = part
    if "decoder.output_projection.weight" not in weights:
        shared = weights["decoder.embed_tokens.weight"]
        weights["decoder.output_projection.weight"] = weights.pop("decoder.embed_out", shared)
    weights[provenance.KEY] = provenance.encode({"rule": "reference", "code": "Transformer-Clinic"})
    return True
