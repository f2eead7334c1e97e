"""Small masked language models, stock and ours."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from reference import dictionary
from torch import nn

import fairseq_admin.plugin  # noqa: F401  (registers the models)

LAYERS, WIDTH, FFN, WORDS = 3, 32, 64, 100
SIZES = {
    "encoder_layers": LAYERS,
    "encoder_embed_dim": WIDTH,
    "encoder_ffn_embed_dim": FFN,
    "encoder_attention_heads": 4,
    "max_positions": 64,
    "quant_noise_pq": 0.0,
    "checkpoint_activations": False,
}


def build(arch: str = "masked_lm_admin", seed: int = 1, **changed: Any) -> nn.Module:
    """A fresh `roberta` or `masked_lm_admin` with plain layers, in training mode. The vocabulary has 104 entries."""
    words = dictionary(WORDS)
    args = Namespace(**{"admin_fast": "off", **SIZES, **changed})
    ARCH_CONFIG_REGISTRY[arch](args)
    torch.manual_seed(seed)
    task = SimpleNamespace(source_dictionary=words, max_positions=lambda: 64)
    return ARCH_MODEL_REGISTRY[arch].build_model(args, task).train()
