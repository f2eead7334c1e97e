"""ω from a depth."""

from __future__ import annotations

import math

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
