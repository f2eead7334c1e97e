"""The variance of Adam's and RAdam's step in the first updates (Liu et al. 2020, "On the Variance of the Adaptive
Learning Rate and Beyond", sections 3 and 4).

    ψ_t = sqrt( (1 - β2^t) / ((1 - β2) Σ_i β2^(t-i) g_i²) )        Adam's step is ψ_t times the mean gradient

At first v_t is a mean of few squares and may be near 0, so ψ_t may be huge. Let g ~ N(0, 1), and approximate the
weighted mean of t squares by an even mean of ρ_t squares. Then ψ_t² is ρ_t over a χ² of ρ_t degrees of freedom, and

    Var[ψ_t] = ρ/(ρ - 2) - ρ/2 ( Γ((ρ - 1)/2) / Γ(ρ/2) )²,    ρ = ρ_t > 2,    infinite below

RAdam multiplies the step by r_t, which makes the variance nearly that of late updates, and makes no step while
ρ_t ≤ 5. The drawn gradients need no approximation. No model is needed.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..fast.radam import rectification, rho
from . import figure

BETAS = (0.98, 0.999)
"""β2 of the papers' translation runs, and the default of torch's Adam."""
UPDATES = 500
DRAWS = 10_000
FIRST = 5
"""The first update with a finite error of the drawn variance: E[ψ⁴] is finite for more than 4 squares."""


def variance_of_rate(degrees: float) -> float:
    """Var[ψ] of an even mean of `degrees` squares of N(0, 1). `degrees` may be fractional."""
    if degrees <= 2:
        return math.inf
    mean = math.sqrt(degrees / 2) * math.exp(math.lgamma((degrees - 1) / 2) - math.lgamma(degrees / 2))
    return degrees / (degrees - 2) - mean**2


def drawn(beta2: float, updates: int, draws: int, seed: int) -> tuple[list[float], list[float]]:
    """Var[ψ_t] of drawn gradients and its standard error, by update from FIRST on."""
    generator = torch.Generator().manual_seed(seed)
    moment = torch.zeros(draws, dtype=torch.float64)
    variances, errors = [], []
    for update in range(1, updates + 1):
        gradient = torch.randn(draws, generator=generator, dtype=torch.float64)
        moment.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if update >= FIRST:
            rate = ((1 - beta2**update) / moment).sqrt()
            squared = (rate - rate.mean()).square()
            variances.append(squared.mean().item())
            errors.append(squared.std().item() / math.sqrt(draws))
    return variances, errors


def measure(
    subject: None = None,
    settings: Any = None,
    betas: tuple[float, ...] = BETAS,
    updates: int = UPDATES,
    draws: int = DRAWS,
    seed: int = 1,
) -> dict[str, Any]:
    """Compute variances by update, from update 1; None if infinite, or if RAdam makes no step."""
    tables = {}
    early: list[float | None] = [None] * (FIRST - 1)
    for beta2 in betas:
        degrees = [rho(update, beta2)[0] for update in range(1, updates + 1)]
        adam = [variance_of_rate(squares) for squares in degrees]
        factors = [rectification(update, beta2) for update in range(1, updates + 1)]
        sampled, errors = drawn(beta2, updates, draws, seed)
        tables[f"{beta2:g}"] = {
            "rho": degrees,
            "adam": [value if math.isfinite(value) else None for value in adam],
            "radam": [r**2 * it if r else None for r, it in zip(factors, adam)],
            "adam, drawn": [*early, *sampled],
            "radam, drawn": [*early, *(r**2 * it if r else None for r, it in zip(factors[FIRST - 1 :], sampled))],
            "standard error, drawn": [*early, *errors],
            "late": variance_of_rate(rho(1, beta2)[1]),
            "largest relative difference, drawn": max(abs(a / b - 1) for a, b in zip(sampled, adam[FIRST - 1 :])),
        }
    return {"updates": updates, "draws": draws, "seed": seed, "beta2": tables}


def draw(result: dict[str, Any]) -> figure.Figure:
    """Draw one panel per β2: closed forms as lines, drawn gradients as dots."""
    made, panels = figure.panels(len(result["beta2"]), sharey=True)
    # Evenly spaced on the logarithmic axis.
    shown = sorted({round(result["updates"] ** (step / 25)) for step in range(26)})
    for axes, (beta2, series) in zip(panels, result["beta2"].items()):
        for number, (name, title) in enumerate((("adam", "Adam"), ("radam", "RAdam"))):
            look: Any = {"color": figure.COLOURS[number]}
            closed = [math.nan if value is None else value for value in series[name]]
            axes.plot(range(1, len(closed) + 1), closed, label=title, **look)
            points = [math.nan if value is None else value for value in series[f"{name}, drawn"]]
            values = [points[update - 1] for update in shown]
            axes.plot(shown, values, figure.MARKERS[number], markersize=3, label=f"{title}, drawn", **look)
        axes.axhline(series["late"], color="grey", linestyle=":", label="late updates")
        axes.set(xscale="log", yscale="log", xlabel="update", title=f"β2 = {beta2}")
    panels[0].set_ylabel("Var[ψ], gradients N(0, 1)")
    panels[0].legend()
    figure.set_title(made, f"Variance of the adaptive learning rate ({result['draws']:,} draws, seed {result['seed']})")
    return made
