"""Measurements of the authors' code of other schemes (rival_code.py, laws.py), and of ours in the tests.

    laws     shape, mean, standard deviation and distribution of weights and biases over SEEDS seeds, of a model of
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

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from golden import omega

SEEDS, SHOWN = 20, 4
LARGEST_NORM = 10.0
"""DT-Fixup's μ."""
SIDES = ("encoder", "decoder")
SIZES = {
    "encoder_layers": 4,
    "decoder_layers": 2,
    **{f"{side}_embed_dim": 32 for side in SIDES},
    **{f"{side}_ffn_embed_dim": 64 for side in SIDES},
    **{f"{side}_attention_heads": 4 for side in SIDES},
}
QKV = ("q_proj", "k_proj", "v_proj")
Drawn = dict[str, numpy.ndarray]


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


def gradients(model: torch.nn.Module, name_of: Callable[[str], str] = str) -> dict[str, list[float]]:
    """[norm, projection] of the gradients of each layer and of the embeddings. The model's parameters are already set.

    Args:
        model: has no dropout; converted to float64 in place.
        name_of: maps a parameter's name to today's name.
    """
    src, lengths, prev = batch()
    logits = model.double()(src, lengths, prev)[0]
    target = prev.roll(-1, 1).where(prev.ne(omega.PAD), omega.PAD)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=omega.PAD).backward()
    layers: dict[str, list[float]] = {}
    for name, gradient in named(model, of=lambda parameter: parameter.grad).items():
        name = name_of(name)
        layer = layers.setdefault(".".join(name.split(".")[:3]) if ".layers." in name else name, [0.0, 0.0])
        direction = omega.value(f"direction of {name}", gradient.shape).double().numpy()
        layer[0] += (gradient**2).sum()
        layer[1] += (gradient * direction).sum()
    return {layer: [float(f"{square**0.5:.9g}"), float(f"{along:.9g}")] for layer, (square, along) in layers.items()}


def rounded(values: torch.Tensor) -> list[list[list[float]]]:
    """Values of shape (sentences, positions, SHOWN), rounded to seven digits."""
    return [[[float(f"{x:.7g}") for x in row] for row in rows] for rows in values.tolist()]


def laws(draw: Callable[[int], Drawn]) -> dict[str, list[Any]]:
    """[shape, mean, standard deviation, distribution] of every tensor that `draw` makes from a seed."""
    drawn: dict[str, list[numpy.ndarray]] = {}
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        for name, value in draw(seed).items():
            if "norm" not in name:
                drawn.setdefault(name, []).append(numpy.float64(value))
    table_rows = {}
    for name, tensors in drawn.items():
        values = numpy.stack(tensors)
        std = values.std()
        # Uniform values stay within sqrt(3) standard deviations; of thousands of normal values, some exceed three.
        law = "constant" if std == 0 else "uniform" if numpy.abs(values).max() < 2 * std else "normal"
        table_rows[name] = [list(values.shape[1:]), float(f"{values.mean():.6g}"), float(f"{std:.6g}"), law]
    return table_rows


def named(module: torch.nn.Module, prefix: str = "", of: Callable[[torch.Tensor], Any] = torch.Tensor.detach) -> Drawn:
    """A module's parameters, or `of` of each. Stacked q, k and v are split."""
    tensors = {}
    for name, parameter in module.named_parameters(prefix):
        value = of(parameter)
        attention, _, kind = name.rpartition(".in_proj_")
        if attention:
            for projection, part in zip(QKV, value.chunk(3)):
                tensors[f"{attention}.{projection}.{kind}"] = part.numpy()
        elif value is not None:  # T-Fixup's code keeps norms that it does not use
            tensors[name] = value.numpy()
    return tensors
