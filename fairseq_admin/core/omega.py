"""ω from a depth, and ω described."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import AdminError

KAPPA = 1 / 6
"""κ of rule `linear`, the same for every model: docs/protocol-depth.md says how it was chosen."""


def omega_from_depth(rule: str, sublayers: int) -> float:
    """Rules that need no batch: one scale for every sub-layer of a stack, from its depth alone, or a number.

        log:       ω² = (S + 1) / ln(S + 1) - 1
        constant:  ω² = S
        linear:    ω = κS, at least 1

    The first two are the closed forms of the package admin-torch, by the paper's first author, for a change of the
    output of "O(log n)" and "O(1)" by random changes of the weights. An optimizer's changes of S branches point the
    same way: they move the output by about S / ω, so by `constant` as √S, and by `linear` as much at every depth.

    Args:
        rule: "log", "constant", "linear" or a number above 0.
        sublayers: S, at least 1.

    Returns:
        ω.
    """
    rules = {
        "log": math.sqrt((sublayers + 1) / math.log(sublayers + 1) - 1),
        "constant": math.sqrt(sublayers),
        "linear": max(1.0, KAPPA * sublayers),
    }
    return rules[rule] if rule in rules else float(rule)


def omega_range(stack: str, omega: Tensor) -> str:
    """Describe a stack and its ω, of shape (S,), in a line for the log.

    Raises:
        AdminError: an ω is not a finite number.
    """
    bad = (~torch.isfinite(omega)).nonzero()
    if len(bad):
        raise AdminError(
            f"profiling measured {omega[bad[0]].item()} for omega at sub-layer {bad[0].item() + 1} of the {stack}; a "
            "finite number was expected. The model overflows on its first batch (or rank 0 failed: see its log); "
            "check the embeddings given, or train in fp32."
        )
    return f"{stack} {len(omega)} sub-layer{'s' * (len(omega) > 1)}, omega {omega.min():.3f} to {omega.max():.3f}"


def omega_summary(omega: Tensor) -> dict[str, float]:
    """Smallest, mean and largest entry of one ω. Shape (C,)."""
    values = omega.detach().to(torch.float64)
    return {"min": values.min().item(), "mean": values.mean().item(), "max": values.max().item()}
