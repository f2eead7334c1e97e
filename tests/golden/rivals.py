"""Measurements of other schemes: of their authors' code (omega.py says how), and, in the tests, of our code.

    laws     shape, mean, standard deviation and distribution of weights and biases over 20 seeds, of a model of
             SIZES; its two depths differ, so a formula that mixes them up fails
    logits   the first SHOWN logits at every position of two sentences, one of them padded; a formula gives every
             parameter and the batch, as in omega.py
    gradients
             of a loss on those sentences, in float64, layer by layer: their norm, and their projection on directions
             that a formula gives
    scales   DeepNorm's constant on the shortcut and its gain

Names are today's fairseq's. Norms are left out.
"""

from __future__ import annotations

from pathlib import Path

import kinds
import torch
from golden import omega

SHOWN = 4
LARGEST_NORM = 10.0
"""DT-Fixup's μ."""
SIZES = {**kinds.SIZES, "encoder_layers": 4}


def table(scheme: str) -> Path:
    return Path(__file__).parent / "rivals" / f"{scheme}.json"


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Source tokens, source lengths and decoder input of two sentences."""
    src, prev = omega.batch(padded=True)
    return src[:2], src[:2].ne(omega.PAD).sum(1), prev[:2]


def logits(model: torch.nn.Module) -> torch.Tensor:
    """Logits of a model whose parameters are all set by the formula. Shape (sentences, positions, SHOWN)."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(omega.value(name, tuple(parameter.shape)))
        return model(*batch())[0][..., :SHOWN]


def gradients(model: torch.nn.Module) -> dict[str, list[float]]:
    """[norm, projection] of the gradients of each layer and of the embeddings. The model's parameters are already set.

    Args:
        model: has no dropout; converted to float64 in place.
    """
    src, lengths, prev = batch()
    logits = model.double()(src, lengths, prev)[0]
    target = prev.roll(-1, 1).where(prev.ne(omega.PAD), omega.PAD)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=omega.PAD).backward()
    layers: dict[str, list[float]] = {}
    for name, parameter in model.named_parameters():
        layer = layers.setdefault(".".join(name.split(".")[:3]) if ".layers." in name else name, [0.0, 0.0])
        direction = omega.value(f"direction of {name}", tuple(parameter.shape)).double()
        layer[0] += parameter.grad.square().sum().item()
        layer[1] += (parameter.grad * direction).sum().item()
    return {layer: [float(f"{square**0.5:.9g}"), float(f"{along:.9g}")] for layer, (square, along) in layers.items()}
