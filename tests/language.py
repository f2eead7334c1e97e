"""Small language models for the tests, masked or not, stock and ours."""

from __future__ import annotations

import random
from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from conftest import preprocess
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from reference import PAD, dictionary
from torch import Tensor, nn

import fairseq_admin.plugin  # noqa: F401  (registers the models)

LAYERS, WIDTH, FFN, WORDS = 3, 32, 64, 100
SIZES = {
    "decoder_layers": LAYERS,
    **{f"decoder_{name}_dim": WIDTH for name in ("embed", "input", "output")},
    "decoder_ffn_embed_dim": FFN,
    "decoder_attention_heads": 4,
    "share_decoder_input_output_embed": True,
    "max_target_positions": 256,
    "tokens_per_sample": 256,
    "add_bos_token": False,
    "tpu": False,
}


MASKED = {
    "encoder_layers": LAYERS,
    "encoder_embed_dim": WIDTH,
    "encoder_ffn_embed_dim": FFN,
    "encoder_attention_heads": 4,
    "max_positions": 64,
    "quant_noise_pq": 0.0,
    "checkpoint_activations": False,
}
"""The sizes of a masked language model."""


def options(arch: str, **changed: Any) -> dict[str, Any]:
    """All options of a stock `transformer_lm`, or of a `transformer_lm_admin` with plain layers, of these sizes."""
    defaults = {field.name: field.default for field in fields(TransformerLanguageModelConfig)}
    admin_options = {"admin_fast": "off"} if "admin" in arch else {}
    return {**defaults, **SIZES, **admin_options, **changed}


def build(arch: str = "transformer_lm_admin", seed: int = 1, **changed: Any) -> nn.Module:
    """A freshly initialised model in training mode. The vocabulary has 104 entries; embeddings are tied."""
    words = dictionary(WORDS)
    torch.manual_seed(seed)
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    return ARCH_MODEL_REGISTRY[arch].build_model(Namespace(**options(arch, **changed)), task).train()


def build_masked(arch: str = "masked_lm_admin", seed: int = 1, **changed: Any) -> nn.Module:
    """A fresh `roberta` or `masked_lm_admin` with plain layers, in training mode. The vocabulary has 104 entries."""
    args = Namespace(**{"admin_fast": "off", **MASKED, **changed})
    ARCH_CONFIG_REGISTRY[arch](args)
    torch.manual_seed(seed)
    task = SimpleNamespace(source_dictionary=dictionary(WORDS), max_positions=lambda: 64)
    return ARCH_MODEL_REGISTRY[arch].build_model(args, task).train()


def batch(sentences: int = 8, longest: int = 11, padded: bool = True, seed: int = 1) -> Tensor:
    """Random words after an end-of-sentence token. Shape (B, T). With `padded`, sentence b is b % 4 words shorter."""
    words = torch.randint(4, WORDS + 4, (sentences, longest), generator=torch.Generator().manual_seed(seed))
    words[:, 0] = 2
    if padded:
        for b in range(sentences):
            words[b, longest - b % 4 :] = PAD
    return words


def binarised(folder: Path) -> Path:
    """Binarise a text inside `folder`: each sentence counts upwards from a random word, in steps of 3."""
    generator = random.Random(1)
    for split, size in (("train", 300), ("valid", 40), ("test", 20)):
        lines = []
        for _ in range(size):
            start = generator.randrange(40)
            lines.append(" ".join(f"w{(start + 3 * i) % 40}" for i in range(generator.randint(3, 14))))
        (folder / split).write_text("\n".join(lines) + "\n")
    return preprocess(folder, "--only-source")
