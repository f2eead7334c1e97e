"""`fairseq-admin analyze gradients` and `updates` against plain loops in float64 and against the papers' claims."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from analysed import fresh
from torch import Tensor

from fairseq_admin.analysis import gradients, updates
from fairseq_admin.analysis.registry import Settings

SUBLAYERS = [
    ("self_attn", "self_attn_layer_norm"),
    ("encoder_attn", "encoder_attn_layer_norm"),
    ("fc2", "final_layer_norm"),
]
"""Of each sub-layer, the last module of its branch, and its norm."""


def moved(model: torch.nn.Module, side: str, place: int, change: Tensor) -> None:
    """Make every later forward add `change` to the output of a stack's sub-layer number `place`."""
    names = {"encoder": SUBLAYERS[::2], "decoder": SUBLAYERS}[side]
    layer, (branch, norm) = getattr(model, side).layers[place // len(names)], names[place % len(names)]

    def move(module: torch.nn.Module, inputs: tuple, output: Any) -> Any:
        return (output[0] + change, *output[1:]) if isinstance(output, tuple) else output + change

    # In Pre-LN, a sub-layer ends with the sum, to which its branch is added.
    getattr(layer, branch if layer.normalize_before else norm).register_forward_hook(move)


@pytest.mark.parametrize("scheme", ["post-ln", "pre-ln", "admin"])
def test_output_gradients_are_the_slopes_of_the_loss(scheme: str) -> None:
    """Reference: the gradient at every sub-layer's output matches finite differences of the loss, in float64."""
    step = 1e-4  # a larger step would cross kinks of the ReLU
    for side, places in (("encoder", 4), ("decoder", 6)):
        for place in range(places):
            subject = fresh(scheme, layers=2, width=8, tokens=32)
            subject.model.double()
            (sample,) = subject.samples
            gradient = gradients.output_gradients(subject, subject.model, sample)[side][place].output.grad
            direction = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(place)).double()
            ends = []
            for sign in (1, -1):
                other = fresh(scheme, layers=2, width=8, tokens=32)
                moved(other.model.double(), side, place, sign * step * direction)
                with torch.no_grad():
                    logits = other.model(**sample["net_input"])[0]
                ends.append(-logits.log_softmax(-1).gather(2, sample["target"].unsqueeze(-1)).mean().item())
            slope = (ends[0] - ends[1]) / (2 * step)
            # fairseq computes the softmaxes of attention in single precision.
            assert (gradient * direction).sum().item() == pytest.approx(slope, rel=1e-2, abs=1e-4), (side, place)


def test_relative_gradients_and_norms_are_the_plain_ones() -> None:
    """Reference: relative norms over all batches and mean gradients match plain loops."""
    subject = fresh("post-ln", layers=2, width=16, tokens=1000)
    assert len(subject.samples) == 2
    result = gradients.measure(subject, Settings(depths=(1, 2), repeats=1))
    squares = [0.0] * 10
    subject.model.zero_grad()
    for sample in subject.samples:
        seen = gradients.output_gradients(subject, subject.model, sample)
        for place, sublayer in enumerate([*seen["encoder"], *seen["decoder"]]):
            squares[place] += math.fsum(float(value) ** 2 for value in sublayer.output.grad.flatten())
    norms = [math.sqrt(value / max(squares)) for value in squares]
    stacks = result["stacks"]
    relative = stacks["encoder"]["relative output gradient"] + stacks["decoder"]["relative output gradient"]
    assert relative == pytest.approx(norms, rel=1e-5) and max(relative) == 1
    weight = subject.model.decoder.layers[1].fc1.weight.grad / 2
    assert stacks["decoder"]["feed-forward"]["W1"][1] == pytest.approx(math.sqrt((weight**2).sum().item()), rel=1e-5)


@pytest.mark.nightly
def test_adam_evens_out_what_gradients_do_not() -> None:
    """Law (section 3.2): Adam evens out the gradients of Post-LN's decoder.

    For every kind of matrix, its gradients differ at least 10-fold between layers, but Adam's updates less than 2-fold.
    Pre-LN's gradients differ less than 10-fold.
    """
    post_ln, pre_ln = (
        updates.measure(fresh(scheme, layers=12, tokens=128), Settings(updates=4))["intervals"][0]["spread"]
        for scheme in ("post-ln", "pre-ln")
    )
    assert min(post_ln["gradient"]["decoder"].values()) > 10
    assert max(post_ln["update"]["decoder"].values()) < 2
    assert max(pre_ln["gradient"]["decoder"].values()) < 10


def test_the_spread_is_of_the_largest_to_the_smallest() -> None:
    assert updates._spread({"a": [1.0, 4.0, 2.0], "b": [0.0, 1.0]}) == {"a": 4.0, "b": None}
