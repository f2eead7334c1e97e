"""Parameters that learn at a fraction of the learning rate, in fairseq's optimizers.

A model marks its parameters (`slow_down`) with fairseq's own attribute `param_group`, which fairseq copies to the float
masters of a half-precision run. fairseq's set_lr gives every group of an optimizer the same rate; the optimizers here
give each its share. Only they read the mark, and they say so in it, so that a model can refuse to train without them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fairseq.optim import FairseqOptimizer, register_optimizer
from fairseq.optim.adam import FairseqAdam, FairseqAdamConfig
from torch import Tensor

from .errors import AdminError


class Slower(str):
    """The `param_group` of some parameters: a name, and what their rate is multiplied by."""

    factor: float
    taken: bool
    """Whether an optimizer has read it."""


def slow_down(parameters: Iterable[Tensor], name: str, factor: float) -> Slower:
    """Mark parameters; returns the mark."""
    mark = Slower(name)
    mark.factor, mark.taken = factor, False
    for p in parameters:
        p.param_group = mark  # type: ignore[attr-defined]
    return mark


def grouped(params: Iterable[Tensor]) -> list[Any]:
    """The parameters as they were, or in groups if some are marked: first those that are not."""
    params = list(params)
    groups: dict[Any, list[Tensor]] = {None: []}
    for p in params:
        mark = getattr(p, "param_group", None)
        groups.setdefault(mark if isinstance(mark, Slower) else None, []).append(p)
    if len(groups) == 1:
        return params
    for mark in groups:
        if mark is not None:
            mark.taken = True
    return [{"params": them, "factor": mark.factor if mark else 1.0} for mark, them in groups.items() if them]


def _tensors(groups: list[dict[str, Any]]) -> str:
    """How many each group has."""
    return " + ".join(str(len(group["params"])) for group in groups)


class ByGroup(FairseqOptimizer):
    """A fairseq optimizer over what `grouped` gives: every group of parameters at its share of the learning rate."""

    def get_lr(self) -> float:
        """The rate of which the groups have their shares."""
        group = self.param_groups[0]
        return group["lr"] / group.get("factor", 1.0)

    def set_lr(self, lr: float) -> None:
        for group in self.param_groups:
            group["lr"] = lr * group.get("factor", 1.0)

    def load_state_dict(self, state_dict: dict[str, Any], optimizer_overrides: dict[str, Any] | None = None) -> None:
        """As fairseq's, but every group's share is the model's, not the one that was saved.

        Raises:
            AdminError: the saved groups are not of as many tensors as these.
        """
        saved, here = _tensors(state_dict["param_groups"]), _tensors(self.param_groups)
        if saved != here:
            raise AdminError(
                f"the checkpoint's optimizer state is of {saved} tensors, and this run's of {here} (is it another "
                "model, or pruned, or of another --pretrained-lr-factor or --fp16-no-flatten-grads?). Resume with the "
                "options that it was trained with. Give --reset-optimizer to start with a new state."
            )
        own = [{"factor": group["factor"]} if "factor" in group else {} for group in self.param_groups]
        super().load_state_dict(state_dict, optimizer_overrides)
        lr = self.get_lr()
        for group, share in zip(self.param_groups, own):
            group.update(share)
        self.set_lr(lr)


@register_optimizer("adam_by_group", dataclass=FairseqAdamConfig)
class AdamByGroup(ByGroup, FairseqAdam):
    """fairseq's adam."""

    def __init__(self, cfg: Any, params: Iterable[Tensor]) -> None:
        super().__init__(cfg, grouped(params))
