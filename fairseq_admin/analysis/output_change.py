"""How much a stack's output changes when its weights change a little, against depth (Liu et al. 2020, section 4.2).

    |F(x, W) - F(x, W*)|² (figure 4)       F: a stack of N layers, its output normalised; the mean over its entries

W* is W with noise in every matrix, or W after one update by Adam, or after several. By corollaries 1 and 2 the change
grows as N for Post-LN and as log N for Pre-LN and Admin. By theorem 2 it is

    Var[ F(x, W) - F(x, W*) ] ≈ Σ_i β_{i,i}² C_i       C_i = Var[ â_i(x_{i-1}, W) - â_i(x_{i-1}, W*) ]

C_i is measured with the input that sub-layer i has under W, so it excludes the change of the sub-layers below.
(The paper has one constant C.)

Several updates give a coordinate check: if |F(x, W) - F(x, W*)| does not grow with depth, one learning rate can serve
every depth. Its exponent e, from |F(x, W) - F(x, W*)| ∝ N^e, is that of the change itself, not of its square.
"""

from __future__ import annotations

import copy
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from ..bar import progress
from ..errors import AdminError
from ..method.schemes import Stack, stacks_of
from ..method.second_stream import SecondNorm
from ..method.sublayers import Sublayer, channel_variance, observed, own_share
from . import figure
from .fresh import Fresh
from .registry import Settings
from .subject import Subject

DEPTHS = (1, 2, 4, 6, 9, 12, 18, 24, 36, 48, 72, 100)
UPDATES = 5
"""Updates of the last series."""
EPSILON = 1e-8
"""The ε of Adam."""
NOISE = 0.01
"""The deviation of the noise, as a share of the matrix's own deviation."""


@torch.no_grad()
def perturb(model: nn.Module, relative: float, generator: torch.Generator) -> None:
    """Add noise to every matrix except embeddings, in place.

    The deviation of the noise is `relative` times the matrix's own deviation.
    """
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    for weight in model.parameters():
        if weight.dim() > 1 and weight not in embeddings:
            noise = torch.randn(weight.shape, generator=generator).to(weight)
            weight.add_(relative * weight.std(correction=0) * noise)


def updated(subject: Subject, model: nn.Module, stack: Stack, lr: float, updates: int) -> Iterator[int]:
    """Train the layers of a stack by Adam on the mean loss over all batches, in place. Yields the number of updates."""
    adam = torch.optim.Adam(stack.layers.parameters(), lr, betas=(0.9, 0.98), eps=EPSILON)
    for update in range(1, updates + 1):
        model.zero_grad()
        subject.backward(model)
        adam.step()
        yield update


@torch.no_grad()
def sublayers_of(stack: Any, words: Tensor, branches: Sequence[Tensor] | None = None) -> list[Sublayer]:
    """The sub-layers of one stack on a batch of words, shape (B, T). For `branches` see `watch`."""
    with observed({"stack": stack}, {"stack": words}, branches) as seen:
        stack(words)
    return seen["stack"]


def states(sublayers: Sequence[Sublayer]) -> list[Tensor]:
    """The output of the first 1, 2, … N layers, normalised.

    Args:
        sublayers: the sub-layers of a stack.

    Returns:
        N tensors. Shapes (R, C).
    """
    last = {sublayer.layer: sublayer for sublayer in sublayers}  # the last sub-layer of each layer
    outputs = [sublayer.rows(sublayer.output) for sublayer in last.values()]
    return [layer_norm(output, output.shape[-1:], eps=torch.finfo(output.dtype).tiny) for output in outputs]


def changes(before: Sequence[Sublayer], after: Sequence[Sublayer]) -> Tensor:
    """|F(x, W) - F(x, W*)|² of the first 1, 2, … N layers.

    Args:
        before: the sub-layers under W.
        after: the sub-layers under W*.

    Returns:
        Shape (N,), float64.
    """
    pairs = zip(states(before), states(after))
    return torch.stack([(one - other).square().mean(dtype=torch.float64) for one, other in pairs])


def predicted(before: Sequence[Sublayer], alone: Sequence[Sublayer]) -> Tensor:
    """Σ β_{i,i}² C_i of theorem 2, for the first 1, 2, … N layers.

    Args:
        before: the sub-layers under W.
        alone: the sub-layers under W*, each of them fed the input that the same sub-layer has under W.

    Returns:
        Shape (N,), float64.
    """
    total, sums = 0.0, {}
    for sublayer, moved in zip(before, alone):
        branch, change = sublayer.rows(sublayer.branch), sublayer.rows(moved.branch - sublayer.branch)
        variance = channel_variance(branch).mean()
        if variance > 0:  # a zero branch has no share
            c = channel_variance(change).mean() / variance
            total += (own_share(sublayer) * c).item()
        sums[sublayer.layer] = total
    return torch.tensor(list(sums.values()), dtype=torch.float64)


def fit(x: Sequence[float], y: Sequence[float]) -> dict[str, float]:
    """Fit the least-squares line a + b·x.

    Args:
        x: values, not all equal.
        y: one value for each x.

    Returns:
        Intercept a, slope b, and r2, the share of y's variance that the line explains. If the line falls, r2 is 0.
    """
    if len(set(y)) < 2:  # the correlation of a constant is undefined
        return {"intercept": y[0], "slope": 0.0, "r2": 0.0}
    slope, intercept = statistics.linear_regression(x, y)
    return {"intercept": intercept, "slope": slope, "r2": max(statistics.correlation(x, y), 0.0) ** 2}


def fits(depths: Sequence[int], values: Sequence[float]) -> dict[str, dict[str, float]]:
    """Fit values against N, and against the natural logarithm of N.

    Args:
        depths: the values of N.
        values: one value for each N.

    Returns:
        The fits: "linear" and "logarithmic".
    """
    return {"linear": fit(depths, values), "logarithmic": fit([math.log(n) for n in depths], values)}


def exponent(depths: Sequence[int], values: Sequence[float]) -> float:
    """The exponent e of a change of the output, from a line through the logarithms: |F(x, W) - F(x, W*)| ∝ N^e.

    Args:
        depths: the values of N.
        values: the squared change at each N.

    Returns:
        e, or NaN if there is one depth, or no change.
    """
    if len(depths) < 2 or min(values) <= 0:
        return math.nan
    return fit([math.log(n) for n in depths], [math.log(value) / 2 for value in values])["slope"]


def _changes(subject: Subject, model: Any, seed: int, settings: Settings) -> Tensor:
    """Measure the changes due to noise, theorem 2's estimate of them, and the changes due to Adam's updates.

    The updates change the model in place.

    Returns:
        The four series, averaged over the batches: noise, the estimate, one update, all updates. Entry n of a series is
        for the output of the first n layers. Shape (4, N).

    Raises:
        AdminError: the stack's output is not its last sub-layer's (ResiDual).
    """
    side = subject.stacks[0]
    stack = stacks_of(model)[side]
    if isinstance(stack.layer_norm, SecondNorm):
        raise AdminError(
            "output-change: the output of ResiDual's stack is a sum of two streams; expected the output of its "
            "last sub-layer. Give another --admin-scheme, or measure dependency, gradients or updates."
        )
    moved = copy.deepcopy(stack)
    perturb(moved.layers, NOISE, torch.Generator().manual_seed(seed))
    batches = [subject.words(sample)[side] for sample in subject.samples]
    before = [sublayers_of(stack, words) for words in batches]
    rows = []
    for words, earlier in zip(batches, before):
        alone = sublayers_of(moved, words, [sublayer.branch for sublayer in earlier])
        rows.append([changes(earlier, sublayers_of(moved, words)), predicted(earlier, alone)])
    del moved
    for update in updated(subject, model, stack, settings.lr, settings.updates or UPDATES):
        if update in (1, settings.updates or UPDATES):
            for words, earlier, row in zip(batches, before, rows):
                row.append(changes(earlier, sublayers_of(stack, words)))
    return torch.stack([torch.stack([*row[:3], row[-1]]) for row in rows]).mean(0)


def measure(subject: Subject, settings: Settings) -> dict[str, Any]:
    """Measure every series, its fits and exponent, and theorem 2's estimate.

    Args:
        subject: the model and its samples.
        settings: depths, repeats, rate and number of updates.

    Returns:
        The series. The error of theorem 2 is None if nothing moves (fresh ReZero).
    """
    side, seed = subject.stacks[0], subject.source.seed + 100
    lr, updates = settings.lr, settings.updates or UPDATES
    if isinstance(subject, Fresh):
        depths, repeats = list(settings.depths or DEPTHS), settings.repeats
        totals = torch.zeros(4, len(depths), dtype=torch.float64)
        runs = list(itertools.product(range(repeats), enumerate(depths)))
        for repeat, (place, depth) in progress("output change", runs, " models"):
            model = subject.make(repeat, **{f"{side}_layers": depth})
            totals[:, place] += _changes(subject, model, seed + repeat, settings)[:, -1] / repeats
    else:  # one trained model gives every depth: the output of each layer
        totals, repeats = _changes(subject, copy.deepcopy(subject.model), seed, settings), 1
        depths = list(range(1, totals.size(1) + 1))
    noise, expected, one, several = totals.tolist()
    errors = [abs(estimate / change - 1) for estimate, change in zip(expected, noise) if change]
    result = {
        "random perturbation": {
            **_series(depths, noise),
            "relative noise": NOISE,
            "theorem 2": {"predicted": expected, "largest relative error": max(errors, default=None)},
        },
        "one update": {**_series(depths, one), "lr": lr},
    }
    if updates > 1:
        result[f"{updates} updates"] = {**_series(depths, several), "lr": lr}
    return {"stack": side, "series": result, "repeats": repeats}


def _series(depths: Sequence[int], change: Sequence[float]) -> dict[str, Any]:
    growth = exponent(depths, change)
    return {
        "depths": depths,
        "change": change,
        "fits": fits(depths, change),
        "exponent": growth if math.isfinite(growth) else None,
    }


def draw(result: dict[str, Any]) -> figure.Figure:
    """Draw a panel for each series: the measured points, both fits, and theorem 2's estimate.

    Args:
        result: the output of `measure`, with the subject's facts.

    Returns:
        The figure.
    """
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
        growth = series.get("exponent")
        title = name if growth is None else f"{name}: |F(x, W) − F(x, W*)| as N^{growth:.2f}"
        axes.set(title=title, xlabel=f"layers N of the {result['stack']}", ylim=(0, None))
        axes.legend()
    panels[0].set_ylabel("|F(x, W) − F(x, W*)|², mean a channel")
    figure.headline(drawn, "Change of the output", result, with_depth=bool(result["model"]["updates"]))
    return drawn
