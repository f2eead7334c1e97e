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
    taken = False
    """Whether an optimizer has read it."""


def slow_down(parameters: Iterable[Tensor], name: str, factor: float) -> Slower:
    """Mark parameters; returns the mark."""
    mark = Slower(name)
    mark.factor = factor
    for p in parameters:
        p.param_group = mark  # type: ignore[attr-defined]
    return mark


def refuse_other_groups(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Refuse a state of other groups than the optimizer's.

    Raises:
        AdminError: they are not of as many tensors as these.
    """
    both = (state_dict["param_groups"], optimizer.param_groups)
    saved, here = (" + ".join(str(len(group["params"])) for group in groups) for groups in both)
    if saved != here:
        raise AdminError(
            f"the checkpoint's optimizer state is of {saved} tensors, and this run's of {here} (is it another "
            "model, or pruned, or of another --pretrained-lr-factor or --fp16-no-flatten-grads?). Resume with the "
            "options that it was trained with. Give --reset-optimizer to start with a new state."
        )


class ByGroup(FairseqOptimizer):
    """A fairseq optimizer over groups of parameters, each at its share of the learning rate.

    The shares are the handle's: under --amp fairseq loads a checkpoint past the handle, into torch's optimizer.

    Under --amp, too, torch's GradScaler first unscales the gradients of torch's optimizer, so that fairseq can clip
    them, and then steps this handle. The scaler takes the handle for another optimizer and would divide its gradients
    by the loss scale again, unless the optimizer says that it handles scaling itself. The scaler then only sets
    `found_inf` during the step: nonzero if a gradient overflowed.
    """

    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None
    shares: list[float]

    def divided(self, params: Iterable[Tensor]) -> list[dict[str, Any]]:
        """Groups as torch's optimizers take them, first the parameters without a mark; shares are kept, marks taken."""
        groups: dict[Slower | None, list[Tensor]] = {None: []}
        for p in params:
            mark = getattr(p, "param_group", None)
            groups.setdefault(mark if isinstance(mark, Slower) else None, []).append(p)
        if not groups[None]:
            del groups[None]
        self.shares = [mark.factor if mark else 1.0 for mark in groups]
        for mark in filter(None, groups):
            mark.taken = True
        return [{"params": tensors} for tensors in groups.values()]

    def get_lr(self) -> float:
        """The rate of which the groups have their shares."""
        return self.param_groups[0]["lr"] / self.shares[0]

    def set_lr(self, lr: float) -> None:
        for group, share in zip(self.param_groups, self.shares):
            group["lr"] = share * lr

    def load_state_dict(self, state_dict: dict[str, Any], optimizer_overrides: dict[str, Any] | None = None) -> None:
        """As fairseq's, but every group's share is the model's, not the one that was saved."""
        super().load_state_dict(state_dict, optimizer_overrides)
        self.set_lr(self.get_lr())

    def step(self, closure: Any = None, scale: Any = 1.0, groups: Any = None) -> None:
        if self.found_inf is None or not self.found_inf.item():
            super().step(closure, scale, groups)


@register_optimizer("adam_by_group", dataclass=FairseqAdamConfig)
class AdamByGroup(ByGroup, FairseqAdam):
    """fairseq's adam."""

    def __init__(self, cfg: Any, params: Iterable[Tensor]) -> None:
        super().__init__(cfg, self.divided(params))
        self.optimizer.register_load_state_dict_pre_hook(refuse_other_groups)
