"""How far a small change of the weights moves a stack's output, against its depth (Liu et al. 2020, section 4.2).

    |F(x, W) - F(x, W*)|² (figure 4)       F: a stack of N layers, its output normalised; the mean over its entries

W* is W with noise in every matrix, or W after one update by Adam. By corollaries 1 and 2 it grows as N for Post-LN and
as log N for Pre-LN and Admin. Theorem 2 says what it is:

    Var[ F(x, W) - F(x, W*) ] ≈ Σ_i β_{i,i}² C_i       C_i = Var[ â_i(x_{i-1}, W) - â_i(x_{i-1}, W*) ]

with C_i measured where sub-layer i has the input that it has under W: its own change, without that of those below.
(The paper has one constant C.)
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..bar import bar
from ..method.schemes import layers_of, stacks_of
from ..method.sublayers import Sublayer, normalised, observed, real_positions, real_rows
from . import figure
from .dependency import own_share
from .fresh import Fresh
from .registry import Settings
from .sentences import PADDING
from .subject import Subject

DEPTHS = (1, 2, 4, 6, 9, 12, 18, 24, 36, 48, 72, 100)
NOISE = 0.01
"""The deviation of the noise, as a share of the matrix's own."""
EPSILON = 1e-8
"""Adam's."""


@torch.no_grad()
def perturb(stack: Any, relative: float, generator: torch.Generator) -> None:
    """Add noise to every weight matrix of a stack's layers, in place.

    Args:
        relative: the noise's standard deviation as a share of the matrix's own, equal for all matrices.
    """
    for weight in stack.layers.parameters():
        if weight.dim() > 1:
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight += relative * weight.std() * noise


@torch.no_grad()
def first_update(stack: Any, lr: float) -> None:
    """What Adam's first update does to the parameters of a stack's layers, in place: lr · g / (|g| + ε)."""
    for parameter in stack.layers.parameters():
        if parameter.grad is not None:
            parameter -= lr * parameter.grad / (parameter.grad.abs() + EPSILON)


@torch.no_grad()
def sublayers_of(stack: Any, words: Tensor, branches: Sequence[Tensor] | None = None) -> list[Sublayer]:
    """The sub-layers of one stack alone on these words. Shape (B, T). `branches` as for `observed`."""
    with observed({"stack": stack}, branches) as seen:
        stack(words)
    return seen["stack"]


def states(sublayers: Sequence[Sublayer], real: Tensor) -> list[Tensor]:
    """What the stack of the first 1, 2, … N layers gives, normalised. Shapes (R, C)."""
    ends = [it for it, after in zip(sublayers, [*sublayers[1:], None]) if after is None or after.layer != it.layer]
    return [normalised(real_rows(it.output, real)) for it in ends]


def changes(before: Sequence[Sublayer], after: Sequence[Sublayer], real: Tensor) -> Tensor:
    """|F(x, W) - F(x, W*)|² of the first 1, 2, … N layers. Shape (N,), float64."""
    pairs = zip(states(before, real), states(after, real))
    return torch.stack([(one - other).square().mean(dtype=torch.float64) for one, other in pairs])


def predicted(before: Sequence[Sublayer], alone: Sequence[Sublayer], real: Tensor) -> Tensor:
    """Σ β_{i,i}² C_i of theorem 2, for the first 1, 2, … N layers. Shape (N,), float64.

    Args:
        before: the sub-layers under W.
        alone: those under W*, each given what it is given under W.
    """
    total, sums = 0.0, {}
    for it, moved in zip(before, alone):
        branch, change = real_rows(it.branch, real), real_rows(moved.branch - it.branch, real)
        deviation = (branch - branch.mean(-1, keepdim=True)).square().mean()
        if deviation > 0:  # a branch that is 0 has no share
            c = (change - change.mean(-1, keepdim=True)).square().mean() / deviation
            total += own_share(it, real) * c.item()
        sums[it.layer] = total
    return torch.tensor(list(sums.values()), dtype=torch.float64)


def fit(x: Sequence[float], y: Sequence[float]) -> dict[str, float]:
    """The least-squares line a + b·x, and the share of y's variance that it explains; 0 for a falling line."""
    points = torch.tensor([list(x), list(y)], dtype=torch.float64)
    if points.size(1) < 2 or not points.std(1).all():
        return {"intercept": float(points[1].mean()), "slope": 0.0, "r2": 0.0}
    covariance = torch.cov(points)
    slope = (covariance[0, 1] / covariance[0, 0]).item()
    correlation = torch.corrcoef(points)[0, 1].item()
    intercept = (points[1].mean() - slope * points[0].mean()).item()
    return {"intercept": intercept, "slope": slope, "r2": max(correlation, 0.0) ** 2}


def fits(depths: Sequence[int], values: Sequence[float]) -> dict[str, dict[str, float]]:
    """Against N, and against the natural logarithm of N."""
    return {"linear": fit(depths, values), "logarithmic": fit([math.log(n) for n in depths], values)}


def _models(
    subject: Subject, depths: Sequence[int], repeat: int, deep: bool
) -> Iterator[tuple[Sequence[int], nn.Module]]:
    """Models, and which of the depths each serves: a model cut off after n layers is one of n layers, where that holds.

    Args:
        deep: one model may serve all depths: its output is not backpropagated.
    """
    if not isinstance(subject, Fresh):
        yield depths, copy.deepcopy(subject.model)
        return
    side = subject.stacks[0]
    # A decoder above the encoder that is measured is needed for the loss alone.
    other = {"decoder_layers": 1} if deep and len(subject.stacks) > 1 else {}
    if deep and subject.cut_is_shallow:
        yield depths, subject.make(repeat, **{**other, f"{side}_layers": max(depths)})
        return
    for depth in depths:
        yield (depth,), subject.make(repeat, **{**other, f"{side}_layers": depth})


def _by_noise(subject: Subject, model: Any, seed: int) -> Tensor:
    """The changes by a random perturbation, and what theorem 2 says of them, over the batches. Shape (2, N)."""
    side = subject.stacks[0]
    stack = stacks_of(model)[side]
    moved = copy.deepcopy(stack)
    perturb(moved, NOISE, torch.Generator().manual_seed(seed))
    rows = []
    for sample in subject.samples:
        words = subject.words(sample)[side]
        real = real_positions(words, PADDING)
        before = sublayers_of(stack, words)
        measured = changes(before, sublayers_of(moved, words), real)
        alone = sublayers_of(moved, words, [sublayer.branch for sublayer in before])
        rows.append(torch.stack([measured, predicted(before, alone, real)]))
    return torch.stack(rows).mean(0)


def _by_update(subject: Subject, model: Any, lr: float) -> Tensor:
    """The changes by Adam's first update on all batches; the embedding stays. Shape (1, N)."""
    side = subject.stacks[0]
    stack = stacks_of(model)[side]
    batches = [subject.words(sample)[side] for sample in subject.samples]
    before = [sublayers_of(stack, words) for words in batches]
    subject.backward(model)
    first_update(stack, lr)
    rows = [
        changes(earlier, sublayers_of(stack, words), real_positions(words, PADDING))
        for earlier, words in zip(before, batches)
    ]
    return torch.stack(rows).mean(0, keepdim=True)


def measure(subject: Subject, settings: Settings) -> dict[str, Any]:
    """Both series, their fits, and theorem 2's, whose error is None where nothing moves, as in a fresh ReZero."""
    side, seed = subject.stacks[0], subject.source.seed + 100
    depths: Sequence[int] = settings.depths or DEPTHS
    repeats = settings.repeats
    if not isinstance(subject, Fresh):
        depths, repeats = range(1, len(layers_of(stacks_of(subject.model)[side])) + 1), 1
    noise, updated = torch.zeros(2, len(depths)).double(), torch.zeros(1, len(depths)).double()
    with bar("output change", 2 * repeats * len(depths), " depths") as shown:
        for repeat in range(repeats):
            for deep, totals in ((True, noise), (False, updated)):
                for served, model in _models(subject, depths, repeat, deep):
                    change = (
                        _by_noise(subject, model, seed + repeat) if deep else _by_update(subject, model, settings.lr)
                    )
                    for depth in served:
                        totals[:, depths.index(depth)] += change[:, depth - 1] / repeats
                    shown.update(len(served))
    measured, expected = noise.tolist()
    apart = [abs(one / other - 1) for one, other in zip(expected, measured) if other]
    theorem = {"predicted": expected, "largest relative error": max(apart, default=None)}
    by_update = updated[0].tolist()
    return {
        "stack": side,
        "series": {
            "random perturbation": {
                "depths": list(depths),
                "change": measured,
                "fits": fits(depths, measured),
                "relative noise": NOISE,
                "theorem 2": theorem,
            },
            "one update": {
                "depths": list(depths),
                "change": by_update,
                "fits": fits(depths, by_update),
                "lr": settings.lr,
            },
        },
        "repeats": repeats,
    }


def draw(result: dict[str, Any]) -> figure.Figure:
    """A panel a series: the measured points, both fits, and theorem 2's estimate."""
    drawn, panels = figure.panels(len(result["series"]))
    for axes, (name, series) in zip(panels, result["series"].items()):
        depths = series["depths"]
        axes.plot(depths, series["change"], linestyle="none", label="measured", **figure.style(0))
        fine = [depths[0] + (depths[-1] - depths[0]) * step / 200 for step in range(201)]
        for number, (kind, line) in enumerate(series["fits"].items()):
            x = fine if kind == "linear" else [math.log(n) for n in fine]
            y = [line["intercept"] + line["slope"] * value for value in x]
            formula = ("a + b N", "a + b ln N")[number]
            axes.plot(
                fine, y, ("-", "--")[number], color=figure.COLOURS[1 + number], label=f"{formula}, R² {line['r2']:.3f}"
            )
        if "theorem 2" in series:
            axes.plot(
                depths, series["theorem 2"]["predicted"], linestyle="none", label="theorem 2", markerfacecolor="none",
                **figure.style(3),
            )  # fmt: skip
        axes.set(title=name, xlabel=f"layers N of the {result['stack']}", ylim=(0, None))
        axes.legend()
    panels[0].set_ylabel("|F(x, W) − F(x, W*)|², mean a channel")
    figure.headline(drawn, "Change of the output", result, with_depth=bool(result["model"]["updates"]))
    return drawn
