"""The dependency of each sub-layer's output on each branch (Liu et al. 2020, sections 4.1 and 4.2, figures 7 and 8).

    x̂_i = Σ_{j≤i} β_{i,j} â_j        x̂_i   sum of sub-layer i, normalised
                                      â_j   output of branch j, normalised; â_0 is the stack's input

The sum of sub-layer i consists of one part per branch. A norm subtracts each part's mean, divides the part by the
deviation of the sum, and multiplies it by the norm's weight. A shortcut's scale multiplies the part. This file follows
the parts through the stack exactly, with the means and deviations that occur on the measured sentences. β_{i,j} is the
size of part j in x̂_i:

    β_{i,j}² = E[ part_j² ],    the mean over channels and positions of the part divided by the sum's deviation there

At initialisation the parts are nearly independent, so Σ_j β_{i,j}² ≈ 1; after training they may not be. `error` is the
largest deviation of a row's sum from 1. The norms' biases belong to no branch and are left out.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..bar import progress
from ..method.schemes import stacks_of
from ..method.sublayers import Sublayer, centred, channel_variance, observed
from . import figure
from .subject import Subject


@torch.no_grad()
def squared_dependencies(sublayers: list[Sublayer]) -> Tensor:
    """β² of one forward pass, summed over the positions.

    Args:
        sublayers: the S sub-layers of one stack.

    Returns:
        Shape (S + 1, S + 1), lower triangular, float64. The first row is the stack's input.
    """
    first = sublayers[0].rows(sublayers[0].shortcut)
    parts = first.new_zeros(len(sublayers) + 1, *first.shape)
    parts[0] = first
    squared = torch.zeros(len(parts), len(parts), dtype=torch.float64)
    squared[0, 0] = len(first)
    at_bottom, layer = parts[:0], -1
    for i, sublayer in enumerate(sublayers, 1):
        if sublayer.layer != layer:
            at_bottom, layer = parts[:i].clone(), sublayer.layer
        parts[:i] *= sublayer.a
        parts[i] = sublayer.b * sublayer.rows(sublayer.branch)
        if sublayer.bottom is not None:
            parts[: len(at_bottom)] += at_bottom
        norm, variance = sublayer.norm, channel_variance(sublayer.rows(sublayer.total))
        for j, part in enumerate(parts[: i + 1]):
            part.copy_(centred(part))
            squared[i, j] = (part.square().mean(-1) / variance).sum(dtype=torch.float64)
            if norm is not None:
                part.mul_(norm.weight / (variance + norm.eps).sqrt()[:, None])
    return squared


def measure(subject: Subject, settings: object = None) -> dict[str, Any]:
    """Measure β of every stack.

    Args:
        subject: the model and its samples.
        settings: not used.

    Returns:
        By stack: rows i = 0 … S with columns j = 0 … i. Row 0 is the input.
    """
    sums: dict[str, Any] = dict.fromkeys(subject.stacks, 0)
    positions = dict.fromkeys(subject.stacks, 0)
    for sample in progress("dependency", subject.samples, " batches"):
        with observed(stacks_of(subject.model), subject.words(sample)) as seen, torch.no_grad():
            subject.model(**sample["net_input"])
        for side, sublayers in seen.items():
            sums[side] = sums[side] + squared_dependencies(sublayers)
            positions[side] += len(sublayers[0].real)
    stacks = {}
    for side, total in sums.items():
        squared = total / positions[side]
        stacks[side] = {
            "sublayers": ["input", *(sublayer.name for sublayer in seen[side])],
            "beta": [row[: i + 1].sqrt().tolist() for i, row in enumerate(squared)],
            "error": (squared.sum(1) - 1).abs().max().item(),
            "positions": positions[side],
        }
    return {"stacks": stacks}


def draw(result: dict[str, Any]) -> figure.Figure:
    """Draw a heat map of β² for each stack. The shares of a row add up to about 1.

    Args:
        result: the output of `measure`, with the subject's facts.

    Returns:
        The figure.
    """
    stacks = result["stacks"]
    drawn, panels = figure.panels(len(stacks), height=3.7)
    for axes, (side, stack) in zip(panels, stacks.items()):
        size = len(stack["beta"])
        table = [[value**2 for value in row] + [math.nan] * (size - len(row)) for row in stack["beta"]]
        image = figure.heat_map(axes, table, 1e-3, interpolation="nearest")
        axes.set(title=f"{side}", xlabel="branch j (0: the input)", ylabel="output of sub-layer i")
        axes.text(
            0.97, 0.95, f"largest |Σⱼ βᵢⱼ² − 1|: {stack['error']:.2g}", transform=axes.transAxes, ha="right", va="top"
        )
        figure.whole_numbers(axes.xaxis, axes.yaxis)
    drawn.colorbar(image, ax=panels, label="βᵢⱼ², share of branch j in output i", extend="min")
    figure.headline(drawn, "Dependency on each branch", result)
    return drawn
