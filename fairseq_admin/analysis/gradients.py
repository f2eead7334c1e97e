"""Vanishing gradients, at initialisation or after training.

- Liu et al. 2020, section 3.1, figure 3: the norm of the gradient with respect to every sub-layer's output, relative to
  the largest in the model. Only the Post-LN decoder's vanish (theorem 1).
- Xiong et al. 2020, section 3.4, figure 3: the norms of the gradients of the feed-forward weights W1 and W2, by layer,
  and of the last layer's W2 against the depth L: flat for Post-LN, as 1/sqrt(L) for Pre-LN.

All gradients are those of the mean cross-entropy, in nats per predicted token, without label smoothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from ..bar import progress
from ..method.schemes import layers_of, stacks_of
from ..method.sublayers import Sublayer, observed
from . import figure
from .fresh import Fresh
from .output_change import fit
from .registry import Settings
from .subject import Subject
from .updates import gradient_of, norms

DEPTHS = (6, 8, 10, 12, 14)


def output_gradients(subject: Subject, model: Any, sample: Any) -> dict[str, list[Sublayer]]:
    """Run one batch forward and backward. Returns the sub-layers by side, with gradients at their outputs.

    The gradients of the weights are added to those of earlier batches.
    """
    with observed(stacks_of(model), subject.words(sample)) as seen:
        loss = subject.loss(model, sample)
        for sublayer in itertools.chain(*seen.values()):
            sublayer.output.retain_grad()
        loss.backward()
    return seen


def _by_layer(subject: Subject) -> dict[str, dict[str, Any]]:
    """Measure every sub-layer and every layer of the subject's model.

    Relative gradients are None if no gradient arrives, as in a fresh Fixup, whose output matrix is 0.
    """
    squares: dict[str, Any] = dict.fromkeys(subject.stacks, 0)
    model, batches = subject.model, len(subject.samples)
    model.zero_grad()
    for sample in progress("gradients", subject.samples, " batches"):
        seen = output_gradients(subject, model, sample)
        for side, sublayers in seen.items():
            gradients = [gradient_of(sublayer.output) for sublayer in sublayers]
            squares[side] = squares[side] + torch.stack([grad.square().sum() for grad in gradients]).double()
    weights = norms({name: gradient_of(p) / batches for name, p in model.named_parameters()})
    largest = max(values.max().item() for values in squares.values())
    return {
        side: {
            "sublayers": [sublayer.name for sublayer in seen[side]],
            "relative output gradient": [
                math.sqrt(value / largest) if largest else None for value in squares[side].tolist()
            ],
            "feed-forward": {"W1": weights[side]["fc1"], "W2": weights[side]["fc2"]},
        }
        for side in subject.stacks
    }


def _last_feed_forward(subject: Fresh, depths: Sequence[int], repeats: int) -> dict[str, Any]:
    """The gradient norm of the last layer's W2 against depth, for every stack, and the exponent of a fitted power law.

    The exponent is None if a norm is 0 or there is only one depth.
    """
    means: dict[str, list[float]] = {side: [0.0] * len(depths) for side in subject.stacks}
    runs = list(itertools.product(enumerate(depths), range(repeats)))
    for (place, depth), repeat in progress("gradients by depth", runs, " models"):
        model = subject.make(repeat, **{f"{side}_layers": depth for side in subject.stacks})
        subject.backward(model)
        for side, stack in stacks_of(model).items():
            means[side][place] += gradient_of(layers_of(stack)[-1].fc2.weight).norm().item() / repeats
    logs = [math.log(depth) for depth in depths]
    powers = {
        side: fit(logs, [math.log(value) for value in values])["slope"] if all(values) and len(logs) > 1 else None
        for side, values in means.items()
    }
    return {"depths": list(depths), "stacks": means, "power of the depth": powers, "repeats": repeats}


def measure(subject: Subject, settings: Settings) -> dict[str, Any]:
    """Measure gradients by sub-layer and layer; in a fresh model also against depth.

    Args:
        subject: the model and its samples.
        settings: depths and repeats.

    Returns:
        By stack, and against depth.
    """
    result: dict[str, Any] = {"stacks": _by_layer(subject)}
    if isinstance(subject, Fresh):
        result["last feed-forward"] = _last_feed_forward(subject, settings.depths or DEPTHS, settings.repeats)
    return result


def draw(result: dict[str, Any]) -> figure.Figure:
    """Draw outputs by sub-layer, feed-forward weights by layer and, for a fresh model, the last W2 against depth.

    Colour shows the scheme, dashes and markers show the stack, and hollow markers W2.

    Args:
        result: the output of `measure`, with the subject's facts.

    Returns:
        The figure.
    """
    last = result.get("last feed-forward")
    drawn, panels = figure.panels(3 if last else 2, height=3.4)
    colour = figure.colour(result["model"]["scheme"])
    for side, stack in result["stacks"].items():
        look: dict[str, Any] = {**figure.STACKS[side], "color": colour}
        values = stack["relative output gradient"]
        places = [step / max(1, len(values) - 1) for step in range(len(values))]
        panels[0].plot(places, values, label=side, markevery=max(1, len(values) // 12), **look)
        for name, values in stack["feed-forward"].items():
            face = "white" if name == "W2" else colour
            label = f"{side[:3]}. {name}"  # short, so that the legend covers no line
            panels[1].plot(range(1, len(values) + 1), values, label=label, markerfacecolor=face, **look)
        if last:
            power = last["power of the depth"][side]
            label = side if power is None else f"{side}: as $L^{{{power:.2f}}}$"
            panels[2].plot(last["depths"], last["stacks"][side], label=label, **look)
    panels[0].set(
        title="outputs of sub-layers", xlabel="place in the stack: 0 first, 1 last",
        ylabel="gradient norm over the largest",
    )  # fmt: skip
    panels[1].set(title="feed-forward weights", xlabel="layer", ylabel="gradient norm")
    for axes in panels[:2]:
        figure.plain_logarithmic(axes)
    figure.whole_numbers(panels[1].xaxis)
    if last:
        panels[2].set(title="W2 of the last layer", xlabel="depth L, layers", ylabel="gradient norm", ylim=(0, None))
        panels[2].set_xticks(last["depths"])
    for axes in panels:
        axes.legend(loc="best", fontsize=7, handlelength=2.7, labelspacing=0.3, borderaxespad=0.2)
    figure.headline(drawn, "Gradients", result)
    return drawn
