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
from . import figure
from .dependency import own_share
from .fresh import Fresh
from .registry import Settings
from .sentences import PADDING
from .subject import Subject
from .sublayers import Sublayer, normalised, observed, real_positions, real_rows

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
    total, found = 0.0, {}
    for it, moved in zip(before, alone):
        branch, change = real_rows(it.branch, real), real_rows(moved.branch - it.branch, real)
        deviation = (branch - branch.mean(-1, keepdim=True)).square().mean()
        if deviation > 0:  # a branch that is 0 has no share
            c = (change - change.mean(-1, keepdim=True)).square().mean() / deviation
            total += own_share(it, real) * c.item()
        found[it.layer] = total
    return torch.tensor(list(found.values()), dtype=torch.float64)


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


def _side(subject: Subject) -> str:
    """The stack that is measured: the encoder where there is one."""
    return subject.stacks[0]


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
    side = _side(subject)
    # A decoder above the encoder that is measured is needed for the loss alone.
    other = {"decoder_layers": 1} if deep and len(subject.stacks) > 1 else {}
    if deep and subject.cut_is_shallow:
        yield depths, subject.make(repeat, **{**other, f"{side}_layers": max(depths)})
        return
    for depth in depths:
        yield (depth,), subject.make(repeat, **{**other, f"{side}_layers": depth})


def _by_noise(subject: Subject, stack: Any, seed: int) -> tuple[Tensor, Tensor]:
    """The changes by a random perturbation, and what theorem 2 says of them, over the batches. Shapes (N,)."""
    side, moved = _side(subject), copy.deepcopy(stack)
    perturb(moved, NOISE, torch.Generator().manual_seed(seed))
    found, expected = [], []
    for sample in subject.samples:
        words = subject.words(sample)[side]
        real = real_positions(words, PADDING)
        before = sublayers_of(stack, words)
        found.append(changes(before, sublayers_of(moved, words), real))
        alone = sublayers_of(moved, words, [it.branch for it in before])
        expected.append(predicted(before, alone, real))
    return torch.stack(found).mean(0), torch.stack(expected).mean(0)


def _by_update(subject: Subject, model: Any, lr: float) -> Tensor:
    """The changes by Adam's first update on all batches; the embedding stays. Shape (N,)."""
    side = _side(subject)
    stack = stacks_of(model)[side]
    sides = [subject.words(sample)[side] for sample in subject.samples]
    before = [sublayers_of(stack, words) for words in sides]
    subject.backward(model)
    first_update(stack, lr)
    found = [
        changes(earlier, sublayers_of(stack, words), real_positions(words, PADDING))
        for earlier, words in zip(before, sides)
    ]
    return torch.stack(found).mean(0)


def measure(subject: Subject, settings: Settings) -> dict[str, Any]:
    """Both series, their fits, and theorem 2's, whose error is None where nothing moves, as in a fresh ReZero."""
    if isinstance(subject, Fresh):
        depths: Sequence[int] = settings.depths or DEPTHS
        repeats = settings.repeats
    else:
        depths = range(1, len(layers_of(stacks_of(subject.model)[_side(subject)])) + 1)
        repeats = 1
    measured, expected, updated = ([0.0] * len(depths) for _ in range(3))
    place = {depth: number for number, depth in enumerate(depths)}
    with bar("output change", 2 * repeats * len(depths), " depths") as shown:
        for repeat in range(repeats):
            for served, model in _models(subject, depths, repeat, deep=True):
                moved, said = _by_noise(subject, stacks_of(model)[_side(subject)], subject.source.seed + 100 + repeat)
                for depth in served:
                    measured[place[depth]] += moved[depth - 1].item() / repeats
                    expected[place[depth]] += said[depth - 1].item() / repeats
                shown.update(len(served))
            for served, model in _models(subject, depths, repeat, deep=False):
                moved = _by_update(subject, model, settings.lr)
                for depth in served:
                    updated[place[depth]] += moved[depth - 1].item() / repeats
                shown.update(len(served))
    apart = [abs(one / other - 1) for one, other in zip(expected, measured) if other]
    return {
        "stack": _side(subject),
        "series": {
            "random perturbation": {
                "depths": list(depths),
                "change": measured,
                "fits": fits(depths, measured),
                "relative noise": NOISE,
                "theorem 2": {"predicted": expected, "largest relative error": max(apart, default=None)},
            },
            "one update": {"depths": list(depths), "change": updated, "fits": fits(depths, updated), "lr": settings.lr},
        },
        "repeats": repeats,
    }


def draw(result: dict[str, Any]) -> figure.Figure:
    """A panel a series: the measured points, both fits, and theorem 2's estimate."""
    drawn, panels = figure.panels(len(result["series"]))
    for axes, (name, found) in zip(panels, result["series"].items()):
        depths = found["depths"]
        axes.plot(depths, found["change"], linestyle="none", label="measured", **figure.style(0))
        fine = [depths[0] + (depths[-1] - depths[0]) * step / 200 for step in range(201)]
        for number, (kind, line) in enumerate(found["fits"].items()):
            x = fine if kind == "linear" else [math.log(n) for n in fine]
            y = [line["intercept"] + line["slope"] * value for value in x]
            formula = ("a + b N", "a + b ln N")[number]
            axes.plot(
                fine, y, ("-", "--")[number], color=figure.COLOURS[1 + number], label=f"{formula}, R² {line['r2']:.3f}"
            )
        if "theorem 2" in found:
            axes.plot(
                depths, found["theorem 2"]["predicted"], linestyle="none", label="theorem 2", markerfacecolor="none",
                **figure.style(3),
            )  # fmt: skip
        axes.set(title=name, xlabel=f"layers N of the {result['stack']}", ylim=(0, None))
        axes.legend()
    panels[0].set_ylabel("|F(x, W) − F(x, W*)|², mean a channel")
    figure.headline(drawn, "Change of the output", result, with_depth=bool(result["model"]["updates"]))
    return drawn
