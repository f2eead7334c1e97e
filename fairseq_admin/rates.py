"""Train some parameters at a fraction of the learning rate, in fairseq's optimizers.

A model marks its parameters (`set_lr_group`) with fairseq's own attribute `param_group`, which fairseq copies to the
float32 masters of a half-precision run. fairseq's set_lr gives every group the same rate; the optimizers here give each
group its share. They note in the mark that they used it, so a model can refuse to train with any other optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fairseq.optim import FairseqOptimizer, register_optimizer
from fairseq.optim.adam import FairseqAdam, FairseqAdamConfig
from torch import Tensor
from torch.optim import Optimizer

from .errors import AdminError


class LrGroup(str):
    """The `param_group` of some parameters: a name, and a factor of their learning rate."""

    factor: float
    used = False
    """Whether an optimizer has formed a group of these parameters."""


def set_lr_group(parameters: Iterable[Tensor], name: str, factor: float) -> LrGroup:
    """Mark parameters as one group.

    Args:
        parameters: the parameters of the group.
        name: the name of the group.
        factor: multiplies the learning rate.

    Returns:
        The mark.
    """
    mark = LrGroup(name)
    mark.factor = factor
    for p in parameters:
        p.param_group = mark  # type: ignore[attr-defined]
    return mark


def refuse_other_groups(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Refuse an optimizer state whose parameter groups differ from those of this run.

    Args:
        optimizer: an optimizer of torch.
        state_dict: the state about to be loaded into it.

    Raises:
        AdminError: the groups differ in number, or in their number of tensors.
    """
    both = (state_dict["param_groups"], optimizer.param_groups)
    saved, here = (" + ".join(str(len(group["params"])) for group in groups) for groups in both)
    if saved != here:
        raise AdminError(
            f"the checkpoint's optimizer state is of {saved} tensors and this run's of {here} (another model, a pruned "
            "one, another --pretrained-lr-factor or --fp16-no-flatten-grads?). Resume with the options that it was "
            "trained with, or give --reset-optimizer to start with a new state."
        )


class ByGroup(FairseqOptimizer):
    """A fairseq optimizer over groups of parameters, each at its share of the learning rate.

    This handle holds the shares, because under --amp fairseq loads a checkpoint into torch's optimizer directly.

    Under --amp torch's GradScaler unscales the gradients of torch's optimizer, so that fairseq can clip them, and then
    steps this handle. It would mistake the handle for a second optimizer, and divide the gradients by the loss scale
    twice. `_step_supports_amp_scaling` prevents that; the scaler then only sets `found_inf` for the step: nonzero if a
    gradient overflowed.
    """

    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None
    shares: list[float]

    def grouped(self, params: Iterable[Tensor]) -> list[dict[str, Any]]:
        """Form the groups that torch's optimizers take, and store their shares.

        Args:
            params: the parameters of the model, some of them marked by `set_lr_group`.

        Returns:
            The groups, unmarked parameters first.
        """
        groups: dict[LrGroup | None, list[Tensor]] = {None: []}
        for p in params:
            mark = getattr(p, "param_group", None)
            groups.setdefault(mark if isinstance(mark, LrGroup) else None, []).append(p)
        if not groups[None]:
            del groups[None]
        self.shares = [mark.factor if mark else 1.0 for mark in groups]
        for mark in filter(None, groups):
            mark.used = True
        return [{"params": tensors} for tensors in groups.values()]

    def get_lr(self) -> float:
        """Find the learning rate.

        Returns:
            The rate before the groups' shares.
        """
        return self.param_groups[0]["lr"] / self.shares[0]

    def set_lr(self, lr: float) -> None:
        for group, share in zip(self.param_groups, self.shares):
            group["lr"] = share * lr

    def load_state_dict(self, state_dict: dict[str, Any], optimizer_overrides: dict[str, Any] | None = None) -> None:
        """Load as fairseq does, but keep the model's shares instead of the saved ones."""
        super().load_state_dict(state_dict, optimizer_overrides)
        self.set_lr(self.get_lr())

    def step(self, closure: object = None, scale: float | Tensor = 1.0, groups: object = None) -> None:
        if self.found_inf is None or not self.found_inf.item():
            super().step(closure, scale, groups)


@register_optimizer("adam_by_group", dataclass=FairseqAdamConfig)
class AdamByGroup(ByGroup, FairseqAdam):
    """fairseq's adam, with a learning rate for each group."""

    def __init__(self, cfg: FairseqAdamConfig, params: Iterable[Tensor]) -> None:
        super().__init__(cfg, self.grouped(params))
        self.optimizer.register_load_state_dict_pre_hook(refuse_other_groups)
