"""The three kinds of model that must keep the same promises: translation, language model, masked language model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import language
import reference
import torch
from reference import PAD
from torch import Tensor, nn

from fairseq_admin.method.norms import shortcut_norms
from fairseq_admin.method.schemes import stacks_of

SIZES = reference.sizes(3, 2, 32, 64)
"""Sizes of the translation models. The two depths differ, so a formula that mixes them up fails."""
STILL = {"dropout": 0.0, "attention_dropout": 0.0}


class Kind(NamedTuple):
    name: str
    build: Callable[..., nn.Module]
    """Builds a plugin model from options, with 3 layers, or 3 and 2."""
    stock: Callable[..., nn.Module]
    """Builds fairseq's own model of the same sizes."""
    batch: Callable[..., dict[str, Tensor]]
    """Makes the input tokens of each stack. Shape (B, T)."""
    parts: dict[str, tuple[str, ...]]
    """Flags that turn on each of fairseq's own schemes."""


def _translation(arch: str, **options: Any) -> nn.Module:
    return reference.build(arch, **{**SIZES, "dropout": 0.1, **options})


def _pair(**options: Any) -> dict[str, Tensor]:
    src, _, prev = reference.batch(**options)
    return {"encoder": src, "decoder": prev}


ENCODER, DECODER = ("encoder_normalize_before",), ("decoder_normalize_before",)
KINDS = {
    "translation": Kind(
        "translation",
        partial(_translation, "transformer_admin"),
        partial(_translation, "transformer"),
        _pair,
        {"post-ln": (), "pre-ln": ENCODER + DECODER, "post-ln-pre-ln": DECODER},
    ),
    "language": Kind(
        "language",
        language.build,
        partial(language.build, "transformer_lm"),
        lambda **options: {"decoder": language.batch(**options)},
        {"post-ln": (), "pre-ln": DECODER, "post-ln-pre-ln": DECODER},
    ),
    "masked": Kind(
        "masked",
        language.build_masked,
        partial(language.build_masked, "roberta"),
        lambda **options: {"encoder": language.batch(**options)},
        {"post-ln": (), "pre-ln": ENCODER, "post-ln-pre-ln": ()},
    ),
}


def logits(model: nn.Module, words: dict[str, Tensor], seed: int = 5) -> Tensor:
    """A model's logits for a batch, with dropout drawn from a seed. Shape (B, T, V)."""
    torch.manual_seed(seed)
    if len(words) == 1:
        return model(*words.values())[0]
    return model(words["encoder"], words["encoder"].ne(PAD).sum(1), words["decoder"])[0]


def trained(model: nn.Module, words: dict[str, Tensor], steps: int = 2) -> dict[str, Tensor]:
    """Logits and gradients of some training steps with dropout, and the final weights."""
    optimizer, model = torch.optim.Adam(model.parameters(), lr=1e-3), model.train()
    tensors: dict[str, Tensor] = {}
    for step in range(steps):
        optimizer.zero_grad()
        tensors[f"logits {step}"] = logits(model, words, seed=step)
        torch.log_softmax(tensors[f"logits {step}"].float(), -1)[..., 3].sum().neg().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        tensors.update({f"gradient {step} {name}": gradient for name, gradient in gradients.items()})
        optimizer.step()
    return {**tensors, **model.state_dict()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Check that both hold the same tensors, bit for bit."""
    assert one.keys() == other.keys()
    differing = [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]
    assert [name for name in differing if "_float_tensor" not in name] == []  # fairseq never initialises it


def omegas(model: nn.Module) -> list[float]:
    """ω of every sub-layer in forward order, at its first channel."""
    return [norm.omega[0].item() for stack in stacks_of(model).values() for norm in shortcut_norms(stack)]
