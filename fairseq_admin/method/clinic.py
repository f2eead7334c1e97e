"""Checkpoints of the authors' own code, by the names of today.

LiyuanLucasLiu/Transformer-Clinic, fairseq/modules/transformer_layer.py at 70f72b7, a fork of fairseq 0.8; that of
namisan/exdeep-nmt has the same names. Their ω is a parameter of the layer, `*_ratio_change`, one for each norm, and q,
k and v are one matrix. They train a stack's first ω too; here it stays the vector that it has become.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping

import torch
from torch import Tensor

from . import provenance
from .state_dict import FIRST_DELTA, OMEGA_DELTA, OMEGA_INIT

NORMS = {"attention": "self_attn", "self": "self_attn", "encoder": "encoder_attn", "fc": "final"}
"""Which norm an ω belongs to, by what its name begins with."""

OPTIONS = {"arch": "transformer_admin", "admin_scheme": "admin"}
"""What the options of such a checkpoint are here; all others keep their names."""

RATIO = re.compile(rf"(.+)\.({'|'.join(NORMS)})_ratio_change")
PACKED = re.compile(r"(.+)\.in_proj_(weight|bias)")


def rename(weights: MutableMapping[str, Tensor]) -> bool:
    """Give a state dict of theirs today's names, in place; whether it was one."""
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
