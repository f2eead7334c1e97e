"""Adam's updates are similar in size across layers, although the gradients are not.

Liu et al. 2020, section 3.2, figures 5 and 11

For every weight matrix, by kind and layer, this measure takes two norms: that of the gradient at a checkpoint W_i, and
|W_{i+1} - W_i|, the change from this checkpoint to the next. The figure shows each norm relative to the largest in the
stack. The W_i are checkpoints of one run; or a fresh model before and after some updates by Adam at one learning rate,
without warm-up.

The spread of a kind is its largest norm over its smallest, among the layers of a stack.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..bar import progress
from ..checkpoints.building import build
from ..checkpoints.checkpoint import Checkpoint
from ..errors import AdminError
from ..method.state_dict import strip_roberta_prefix
from . import figure
from .fresh import Fresh
from .registry import Settings
from .subject import Subject

NAME = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.(self_attn|encoder_attn)?\.?(\w+)\.weight")
KINDS = {
    "self_attn q_proj": "self-att. Wq", "self_attn k_proj": "self-att. Wk", "self_attn v_proj": "self-att. Wv",
    "self_attn out_proj": "self-att. Wo", "encoder_attn q_proj": "enc.-att. Wq", "encoder_attn k_proj": "enc.-att. Wk",
    "encoder_attn v_proj": "enc.-att. Wv", "encoder_attn out_proj": "enc.-att. Wo", "fc1": "W1", "fc2": "W2",
}  # fmt: skip
"""The kinds of weight matrix, and their names in a figure."""
UPDATES = 10
"""Updates of a fresh model."""
Norms = dict[str, dict[str, list[float]]]
"""By stack, by kind, by layer."""


def gradient_of(tensor: Tensor) -> Tensor:
    """The gradient of a tensor, after a backward: zeros if none arrived, as in an encoder that no decoder reads."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def norms(tensors: Mapping[str, Tensor]) -> Norms:
    """Compute the norms of the weight matrices of layers, or of their gradients or changes.

    Args:
        tensors: a weight, a gradient or a change for each weight's name.

    Returns:
        The norms by stack, kind and layer.
    """
    layers: dict[str, dict[str, dict[int, float]]] = {}
    for key, tensor in strip_roberta_prefix(tensors).items():
        if (match := NAME.fullmatch(key)) and tensor.dim() > 1:
            side, layer, attention, linear = match.groups()
            kind = f"{attention} {linear}" if attention else linear
            layers.setdefault(side, {}).setdefault(kind, {})[int(layer)] = tensor.double().norm().item()
    return {
        side: {kind: [of[kind][layer] for layer in sorted(of[kind])] for kind in KINDS if kind in of}
        for side, of in layers.items()
    }


def _gradients(subject: Subject, model: Any) -> Norms:
    """The norms of the gradients of the mean loss over the batches."""
    model.zero_grad()
    subject.backward(model)
    return norms({name: gradient_of(parameter) for name, parameter in model.named_parameters()})


def _moved(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Norms:
    return norms({key: after[key].float() - tensor.float() for key, tensor in before.items() if NAME.search(key)})


def _interval(first: str, last: str, gradient: Norms, update: Norms) -> dict[str, Any]:
    """A result for the interval between two checkpoints; the spread of a kind is None if one of its norms is 0."""
    both = {"gradient": gradient, "update": update}
    spread = {what: {side: _spread(kinds) for side, kinds in sides.items()} for what, sides in both.items()}
    return {"from": first, "to": last, **both, "spread": spread}


def _spread(kinds: Mapping[str, list[float]]) -> dict[str, float | None]:
    return {kind: max(values) / min(values) if min(values) > 0 else None for kind, values in kinds.items()}


def _of_checkpoints(checkpoints: Sequence[Checkpoint], subject: Subject) -> list[dict[str, Any]]:
    intervals = []
    for one, other in progress("updates", list(itertools.pairwise(checkpoints)), " checkpoints"):
        update = _moved(one.weights, other.weights)
        if not any(any(values) for kinds in update.values() for values in kinds.values()):
            raise AdminError(f"{other.name} has the same weights as {one.name}. Give different checkpoints of a run.")
        intervals.append(_interval(one.name, other.name, _gradients(subject, build(one)), update))
    return intervals


def _of_fresh(subject: Fresh, settings: Settings) -> dict[str, Any]:
    model = subject.model
    gradient = _gradients(subject, model)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items() if NAME.search(key)}
    adam = torch.optim.Adam(model.parameters(), lr=settings.lr, betas=(0.9, 0.98))
    updates = settings.updates or UPDATES
    for number in progress("updates", range(updates), " updates"):
        adam.zero_grad()
        subject.loss(model, subject.samples[number % len(subject.samples)]).backward()
        adam.step()
    last = f"{updates} updates by Adam, lr {settings.lr:g}"
    return _interval("initialisation", last, gradient, _moved(before, model.state_dict()))


def measure(subject: Subject, settings: Settings) -> dict[str, Any]:
    """Measure the interval from each checkpoint to the next, or one interval of a fresh model.

    Args:
        subject: the model and its samples.
        settings: rate and number of updates of a fresh model.

    Returns:
        The intervals.

    Raises:
        AdminError: only one checkpoint is given, or two have the same weights.
    """
    if isinstance(subject, Fresh):
        return {"intervals": [_of_fresh(subject, settings)]}
    if len(subject.checkpoints) < 2:
        raise AdminError(
            f"{subject.checkpoints[0].name} is the only checkpoint; updates compares each with the next. Give two or "
            "more checkpoints of a run, in order."
        )
    return {"intervals": _of_checkpoints(subject.checkpoints, subject)}


def draw(result: dict[str, Any]) -> figure.Figure:
    """Draw gradients and updates of the last interval as heat maps, with a row of panels per stack.

    A heat map has a row per kind of weight matrix and a column per layer.

    Args:
        result: the output of `measure`, with the subject's facts.

    Returns:
        The figure.
    """
    last = result["intervals"][-1]
    sides = list(last["update"])
    names = " to ".join(figure.name_as_it_is(last[name].rpartition("/")[2]) for name in ("from", "to"))
    drawn, panels = figure.panels(2, 0.9 + 2.1 * len(sides), rows=len(sides))
    titles = {"gradient": ("|∂L/∂W|", "layer"), "update": ("|Wᵢ₊₁ − Wᵢ|", f"layer ({names})")}
    for axes, (side, what) in zip(panels, itertools.product(sides, titles)):
        kinds = last[what][side]
        largest = max(max(values) for values in kinds.values()) or 1.0
        table = [[value / largest for value in values] for values in kinds.values()]
        image = figure.heat_map(axes, table, 1e-2, aspect="auto")
        axes.set_yticks(range(len(kinds)), [KINDS[kind] for kind in kinds] if what == "gradient" else [])
        layers = len(table[0])
        step = max(1, -(-layers // 9))
        axes.set_xticks(range(0, layers, step), map(str, range(1, layers + 1, step)))
        title, label = titles[what]
        axes.set(title=f"{side}, {title}", xlabel=label if side == sides[-1] else "")
    drawn.colorbar(image, ax=panels, label="norm, of the stack's largest", extend="min")
    figure.headline(drawn, "Gradients and updates", result)
    return drawn
