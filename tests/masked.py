"""Small masked language models for the tests, stock and ours, and their plain twins."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from reference import PAD, Branch, dictionary, ended, fixup_attention, normalised, omega_paper, variance
from torch import Tensor, nn

import fairseq_admin  # noqa: F401  (registers the model)

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


def build(arch: str = "masked_lm_admin", seed: int = 1, **given: Any) -> nn.Module:
    """A freshly initialised `roberta` or `masked_lm_admin`, of plain layers, in training mode. Vocabulary of 104."""
    words = dictionary(WORDS)
    args = Namespace(**{"admin_fast": "off", **SIZES, **given})
    ARCH_CONFIG_REGISTRY[arch](args)
    torch.manual_seed(seed)
    task = SimpleNamespace(source_dictionary=words, max_positions=lambda: 64)
    return ARCH_MODEL_REGISTRY[arch].build_model(args, task).train()


def batch(sentences: int = 8, longest: int = 11, padded: bool = True, seed: int = 1) -> Tensor:
    """Random words. Shape (B, T); with `padded`, sentence b is b % 4 words shorter."""
    words = torch.randint(4, WORDS + 4, (sentences, longest), generator=torch.Generator().manual_seed(seed))
    if padded:
        for b in range(sentences):
            words[b, longest - b % 4 :] = PAD
    return words


def _embedded(stack: nn.Module, words: Tensor) -> Tensor:
    """Shape (T, B, C), zero where padding is."""
    x = stack.embed_tokens(words) + stack.embed_positions(words)
    x = x if stack.layernorm_embedding is None else normalised(x, stack.layernorm_embedding)
    return stack.dropout_module(x).masked_fill(words.eq(PAD).unsqueeze(2), 0).transpose(0, 1)


def by_hand(model: nn.Module, words: Tensor, sublayer: Callable[..., Tensor], bottom: bool = False) -> Tensor:
    """Logits of a model without dropout, its layers written out. Arguments as for `language.by_hand`; (B, T, V)."""
    stack = model.encoder.sentence_encoder
    x, mask = _embedded(stack, words), words.eq(PAD)
    for layer in stack.layers:
        b = 1.0 if getattr(layer, "branch_scale", None) is None else layer.branch_scale.item()
        first: tuple[Any, ...] = (None,) if bottom else ()
        last: tuple[Any, ...] = (x,) if bottom else ()

        def attention(y: Tensor, layer=layer) -> Tensor:
            return layer.self_attn.forward(y, y, y, key_padding_mask=mask, need_weights=False)[0]

        def feed_forward(y: Tensor, layer=layer) -> Tensor:
            return layer.fc2.forward(layer.activation_fn(layer.fc1.forward(y)))

        x = sublayer(x, Branch(attention, *[layer.self_attn] * 2), layer.self_attn_layer_norm, b, *first)
        x = sublayer(x, Branch(feed_forward, layer.fc1, layer.fc2), layer.final_layer_norm, b, *last)
    x = ended(x, stack, sublayer)
    return head_by_hand(model, x)


def head_by_hand(model: nn.Module, x: Tensor) -> Tensor:
    """Shapes (T, B, C) and (B, T, V)."""
    head = model.encoder.lm_head
    x = normalised(nn.functional.gelu(head.dense(x.transpose(0, 1))), head.layer_norm)
    return x @ model.encoder.sentence_encoder.embed_tokens.weight.t() + head.bias


def fixup_by_hand(model: nn.Module, words: Tensor) -> Tensor:
    """Logits of a Fixup model without dropout, every bias and multiplier where the paper has it. Shape (B, T, V)."""
    stack = model.encoder.sentence_encoder
    x = _embedded(stack, words)
    mask = torch.zeros(words.shape, dtype=x.dtype).masked_fill(words.eq(PAD), -math.inf)[:, None, None, :]
    for layer in stack.layers:
        y = x + layer.self_attn_layer_norm.bias
        x = x + fixup_attention(layer.self_attn, y, y, mask)
        y = (x + layer.final_layer_norm.bias) @ layer.fc1.weight.t() + layer.fc1.output_bias
        y = (nn.functional.gelu(y) + layer.fc2.input_bias) @ layer.fc2.weight.t()
        x = x + layer.fc2.branch_multiplier * y
    return head_by_hand(model, stack.layer_norm.multiplier * (x + stack.layer_norm.bias))


def profile_by_hand(model: nn.Module, words: Tensor, rule: str) -> list[float]:
    """ω of the sub-layers: no hooks, no use of the norms' forward or of ω in the model. Draws dropout as it does."""
    stack, mask = model.encoder.sentence_encoder, words.eq(PAD)
    omega, following = [], 1.0
    branches: list[float] = []
    with torch.no_grad():
        x = _embedded(stack, words)
        input_variance = variance(x, ~mask.t())

        def add(branch: Tensor, shortcut: Tensor, norm: nn.LayerNorm) -> Tensor:
            nonlocal following
            branches.append(variance(branch, ~mask.t()))
            used = following if rule == "reference" else 1.0
            omega.append(used)
            following = math.sqrt(used * used * variance(shortcut, ~mask.t()) + branches[-1])
            return normalised(shortcut * used + branch, norm)

        for layer in stack.layers.children():  # all of them, layerdrop or not
            f = layer.self_attn(x, x, x, key_padding_mask=mask, need_weights=False)[0]
            x = add(layer.dropout_module(f), x, layer.self_attn_layer_norm)
            f = layer.fc2(layer.activation_dropout_module(layer.activation_fn(layer.fc1(x))))
            x = add(layer.dropout_module(f), x, layer.final_layer_norm)
    return omega if rule == "reference" else omega_paper(input_variance, branches)
