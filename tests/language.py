"""Small language models for the tests, stock and ours, and their plain twins."""

from __future__ import annotations

import math
import random
from argparse import Namespace
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from conftest import run_module
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from reference import PAD, Branch, dictionary, ended, fixup_attention, omega_paper, variance
from torch import Tensor, nn

import fairseq_admin  # noqa: F401  (registers the model)

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
STILL = {"dropout": 0.0, "attention_dropout": 0.0}


def options(arch: str, **given: Any) -> dict[str, Any]:
    """All options of a stock `transformer_lm` or of a `transformer_lm_admin` of those sizes, layers the plain ones."""
    defaults = {field.name: field.default for field in fields(TransformerLanguageModelConfig)}
    own = {"admin_fast": "off"} if "admin" in arch else {}
    return {**defaults, **SIZES, **own, **given}


def build(arch: str = "transformer_lm_admin", seed: int = 1, **given: Any) -> nn.Module:
    """A freshly initialised model in training mode. Vocabulary of 104, embeddings tied."""
    words = dictionary(WORDS)
    torch.manual_seed(seed)
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    return ARCH_MODEL_REGISTRY[arch].build_model(Namespace(**options(arch, **given)), task).train()


def batch(sentences: int = 8, longest: int = 11, padded: bool = True, seed: int = 1) -> Tensor:
    """Random words, after an end of sentence. Shape (B, T); with `padded`, sentence b is b % 4 words shorter."""
    words = torch.randint(4, WORDS + 4, (sentences, longest), generator=torch.Generator().manual_seed(seed))
    words[:, 0] = 2
    if padded:
        for b in range(sentences):
            words[b, longest - b % 4 :] = PAD
    return words


def binarised(folder: Path) -> Path:
    """A folder of binarised text, made in `folder`: sentences that count upwards from a random word, in steps of 3."""
    generator = random.Random(1)
    for split, size in (("train", 300), ("valid", 40), ("test", 20)):
        lines = []
        for _ in range(size):
            start = generator.randrange(40)
            lines.append(" ".join(f"w{(start + 3 * i) % 40}" for i in range(generator.randint(3, 14))))
        (folder / split).write_text("\n".join(lines) + "\n")
    prefixes = [f"--{split}pref={folder / split}" for split in ("train", "valid", "test")]
    given = ["--only-source", *prefixes, "--destdir", folder / "bin"]
    done = run_module("fairseq_cli.preprocess", *given, log=folder / "preprocess.log")
    assert done.status == 0, done.output
    return folder / "bin"


def _masks(words: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    future = torch.full((words.size(1), words.size(1)), -math.inf, dtype=dtype).triu(1)
    padding = words.eq(PAD)
    return {"key_padding_mask": padding if padding.any() else None, "need_weights": False, "attn_mask": future}


def _embedded(decoder: nn.Module, words: Tensor) -> Tensor:
    """Shape (T, B, C)."""
    x = decoder.embed_scale * decoder.embed_tokens(words) + decoder.embed_positions(words)
    return decoder.dropout_module(x).transpose(0, 1)


def by_hand(model: nn.Module, words: Tensor, sublayer: Callable[..., Tensor], bottom: bool = False) -> Tensor:
    """Logits of a model without dropout, its layers written out.

    Args:
        sublayer: one of reference.py's sub-layers.
        bottom: whether a layer's last sub-layer also takes the layer's input.

    Returns:
        Shape (B, T, V).
    """
    decoder, x = model.decoder, _embedded(model.decoder, words)
    masks = _masks(words, x.dtype)
    for layer in decoder.layers:
        b = 1.0 if getattr(layer, "branch_scale", None) is None else layer.branch_scale.item()
        start = x

        def attention(y: Tensor, layer=layer) -> Tensor:
            return layer.self_attn.forward(y, y, y, **masks)[0]

        def feed_forward(y: Tensor, layer=layer) -> Tensor:
            return layer.fc2.forward(layer.activation_fn(layer.fc1.forward(y)))

        last: tuple[Any, ...] = ()
        first: tuple[Any, ...] = ()
        if bottom:
            first, last = (None,), (start,)
        x = sublayer(x, Branch(attention, *[layer.self_attn] * 2), layer.self_attn_layer_norm, b, *first)
        x = sublayer(x, Branch(feed_forward, layer.fc1, layer.fc2), layer.final_layer_norm, b, *last)
    x = ended(x, decoder, sublayer)
    return x.transpose(0, 1) @ decoder.embed_tokens.weight.t()


def fixup_by_hand(model: nn.Module, words: Tensor) -> Tensor:
    """Logits of a Fixup model without dropout, every bias and multiplier where the paper has it. Shape (B, T, V)."""
    decoder, x = model.decoder, _embedded(model.decoder, words)
    mask = torch.full((words.size(1), words.size(1)), -math.inf, dtype=x.dtype).triu(1)
    for layer in decoder.layers:
        y = x + layer.self_attn_layer_norm.bias
        x = x + fixup_attention(layer.self_attn, y, y, mask)
        y = (x + layer.final_layer_norm.bias) @ layer.fc1.weight.t() + layer.fc1.output_bias
        y = (y.clamp(min=0) + layer.fc2.input_bias) @ layer.fc2.weight.t()
        x = x + layer.fc2.branch_multiplier * y
    return (x + decoder.layer_norm.bias).transpose(0, 1) @ decoder.embed_tokens.weight.t()


def profile_by_hand(model: nn.Module, words: Tensor, rule: str) -> list[float]:
    """ω of the decoder's sub-layers: no hooks, no use of the norms' forward or of ω in the model."""
    decoder, real = model.decoder, ~words.eq(PAD).t()
    omega, following = [], 1.0
    branches: list[float] = []
    with torch.no_grad():
        x = _embedded(decoder, words)
        masks, input_variance = _masks(words, x.dtype), variance(x, real)

        def add(branch: Tensor, shortcut: Tensor, norm: nn.LayerNorm) -> Tensor:
            nonlocal following
            branches.append(variance(branch, real))
            used = following if rule == "reference" else 1.0
            omega.append(used)
            following = math.sqrt(used * used * variance(shortcut, real) + branches[-1])
            return nn.functional.layer_norm(shortcut * used + branch, (x.size(2),), norm.weight, norm.bias, norm.eps)

        for layer in decoder.layers:
            x = add(layer.dropout_module(layer.self_attn(x, x, x, **masks)[0]), x, layer.self_attn_layer_norm)
            f = layer.fc2(layer.activation_dropout_module(layer.activation_fn(layer.fc1(x))))
            x = add(layer.dropout_module(f), x, layer.final_layer_norm)
    return omega if rule == "reference" else omega_paper(input_variance, branches)
