"""ω of each sub-layer: the profiled and the trained value, and the values of the depth rules (section 4.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..core.omega import omega_from_depth
from ..errors import AdminError
from ..method import state_dict
from . import figure
from .registry import Settings
from .subject import Subject

RULES = {"log": "--", "constant": ":", "linear": "-."}
"""The rules that use the depth alone, and their line styles."""


def by_stack(weights: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """ω of every stack in a state dict: profiled, trained, and by the depth rules.

    Args:
        weights: a model's state dict.

    Returns:
        By side: the sub-layers' names, and each kind of ω. The profiled and the trained ω are lists with one entry per
        sub-layer; each depth rule gives one value.
    """
    # Without omega_delta, omegas() returns the profiled ω.
    profiled = state_dict.omegas({key: it for key, it in weights.items() if not key.endswith(state_dict.OMEGA_DELTA)})
    return {
        side: {
            "sublayers": list(sublayers),
            "profiled": [state_dict.omega_summary(omega)["mean"] for omega in profiled[side].values()],
            "trained": [state_dict.omega_summary(omega) for omega in sublayers.values()],
            "closed form": {rule: omega_from_depth(rule, len(sublayers)) for rule in RULES},
        }
        for side, sublayers in state_dict.omegas(weights).items()
    }


def measure(subject: Subject, settings: Settings) -> dict[str, Any]:
    """Measure ω of every stack. A fresh model has no trained ω.

    Args:
        subject: the model.
        settings: not used.

    Returns:
        By stack: see `by_stack`.

    Raises:
        AdminError: the model has none.
    """
    stacks = by_stack(subject.checkpoints[0].weights if subject.checkpoints else subject.model.state_dict())
    if not stacks:
        raise AdminError(
            f"{subject.name} has no omega: it is not (or no longer) an Admin model. Give a checkpoint of the scheme "
            "admin, before it was folded."
        )
    if not subject.checkpoints:
        stacks = {side: {**stack, "trained": None} for side, stack in stacks.items()}
        if "samples" in vars(subject):  # profiling used only the first batch
            return {"tokens": subject.tokens(subject.samples[0]), "stacks": stacks}
    return {"stacks": stacks}


def draw(result: dict[str, Any]) -> figure.Figure:
    """Draw a panel for each stack: profiled ω as rings, trained ω as its mean and range over the channels.

    Args:
        result: the output of `measure`, with the subject's facts.

    Returns:
        The figure.
    """
    colour = figure.colour(result["model"]["scheme"])
    drawn, panels = figure.panels(len(result["stacks"]), sharey=True)
    for axes, (side, stack) in zip(panels, result["stacks"].items()):
        numbers = range(1, len(stack["sublayers"]) + 1)
        if stack["trained"]:
            low, mean, high = ([omega[name] for omega in stack["trained"]] for name in ("min", "mean", "max"))
            axes.plot(numbers, mean, label="trained: mean", color=colour, linewidth=1)
            axes.fill_between(numbers, low, high, label="trained: range", color=colour, alpha=0.4, linewidth=0)
        hollow: Any = {"markerfacecolor": "none", "markersize": 6, "linewidth": 0.8, "markevery": 3}
        axes.plot(numbers, stack["profiled"], "o--", label="profiled", color=colour, **hollow)
        for rule, value in stack["closed form"].items():
            axes.axhline(value, label=f"by depth, rule {rule}", color="grey", linestyle=RULES[rule])
        axes.set(title=side, xlabel="sub-layer")
        figure.whole_numbers(axes.xaxis)
    panels[0].set_ylabel("ω")
    panels[0].set_ylim(0, None)
    handles, labels = panels[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.headline(drawn, "ω by sub-layer", result)
    return drawn
