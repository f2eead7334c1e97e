"""When a run is looked at, and where that is shown: fairseq's log, TensorBoard, Weights & Biases.

fairseq tells a model the number of updates before every batch, calls its `forward`, and after the last batch of an
update its `all_reduce_grads`. So the first batch of an update is measured, then the gradients of the whole of it, and
both are logged when the next update begins, in the aggregates of fairseq's trainer, which its progress bars read.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import metrics
from torch import Tensor, nn

from ..method.schemes import layers_of, stacks_of
from .divergence_rule import DivergenceRule
from .probe import StackProbe

logger = logging.getLogger(__name__)

PRIORITY = 600
"""Where fairseq's log shows the values: after the gradient's norm, before the times."""


def first_rank() -> bool:
    """Whether this process is the one that logs."""
    return distributed_utils.get_global_rank() == 0


def gradient_norms(model: Any) -> dict[str, Tensor]:
    """The norm of the gradients of all weights ("model"), and of the layers of each stack, in float32.

    They are in fairseq's units of the moment: summed over tokens, and times the loss scale. An empty dict where there
    are none.
    """
    parts: dict[str, nn.Module] = {side: nn.ModuleList(layers_of(stack)) for side, stack in stacks_of(model).items()}
    norms = {}
    for name, module in {"model": model, **parts}.items():
        weights = [weight for weight in module.parameters() if weight.grad is not None]
        if not weights:
            return {}
        each = [torch.linalg.vector_norm(weight.grad, dtype=torch.float32) for weight in weights]
        norms[name] = torch.linalg.vector_norm(torch.stack(each))
    return norms


class Monitor:
    """Watches one model in training; every rank has one, and the first one measures.

    Args:
        every: measure once in so many updates, and in the first; 0: never.
        thorough: measure variances and gradients, and look for signs of divergence; else ω alone.
    """

    def __init__(self, every: int, thorough: bool) -> None:
        self.every = every
        self.thorough = thorough
        self.probes: dict[str, StackProbe] = {}
        self.norms: dict[str, Tensor] = {}
        self.shown: dict[str, float] = {}
        self.rule = DivergenceRule()
        self.restart()

    def restart(self) -> None:
        """Forget every batch: the next one is a run's first."""
        self.num_updates = -1
        self.due = self.ended = False

    def before_batch(self, num_updates: int) -> None:
        """Call once a batch with the number of updates made so far."""
        if not self.every or not first_rank():
            return
        ended, self.ended = self.ended, False
        broken = not all(probe.whole for probe in self.probes.values())
        if num_updates == self.num_updates:
            if broken or ended and self.probes:
                # A batch ran out of memory, or the update was skipped, its gradients had overflowed: measure the next.
                self._forget()
                self.due = True
            return
        if broken:
            self._forget()
        elif self.probes:
            self._finish()
        # What is measured now is logged with the next update, and logs are written after multiples.
        self.due = self.num_updates < 0 or (num_updates + 2) % self.every == 0
        self.num_updates = num_updates
        for name, value in self.shown.items():
            metrics.log_scalar(name, value, weight=0, priority=PRIORITY)

    def before_forward(self, model: Any, given: dict[str, Tensor]) -> None:
        """Call before every forward with the input of each stack, of shape (B, T)."""
        self._step_aside()
        if self.due and model.training and torch.is_grad_enabled():
            self.due = False
            stacks = stacks_of(model)
            self.probes = {side: StackProbe(stacks[side], tokens, self.thorough) for side, tokens in given.items()}

    def after_backward(self, model: Any) -> None:
        """Call when the gradients of an update are there, before they are clipped."""
        self.ended = True
        self._step_aside()
        if self.probes and self.thorough:
            self.norms = gradient_norms(model)

    def _step_aside(self) -> None:
        for probe in self.probes.values():
            probe.close()

    def _forget(self) -> None:
        self._step_aside()
        self.probes, self.norms = {}, {}

    def _finish(self) -> None:
        """Read what was measured, in one wait for the device."""
        self._step_aside()
        seen = {side: probe.values() for side, probe in self.probes.items()}
        tensors = {f"{side}_{name}": value for side, values in seen.items() for name, value in values.items()}
        of_fairseq = {name: meter.val for name in ("gnorm", "loss") if (meter := metrics.get_meter("default", name))}
        if self.norms and of_fairseq.get("gnorm") is not None:
            # fairseq's own norm is of the gradient that the optimizer takes, before it is clipped.
            scale = torch.as_tensor(of_fairseq["gnorm"], device=self.norms["model"].device) / self.norms.pop("model")
            tensors.update({f"{side}_gnorm": norm * scale for side, norm in self.norms.items()})
        shares = {side: f"{side}_beta_mean" for side, values in seen.items() if "beta_mean" in values}
        self.probes, self.norms = {}, {}
        values = dict(
            zip(tensors, torch.stack([value.float() for value in tensors.values()]).tolist() if tensors else [])
        )
        self.shown = {name: float(f"{value:.4g}") for name, value in values.items()}
        betas = {side: values[name] for side, name in shares.items()}
        if betas and of_fairseq.get("loss") is not None:
            for warning in self.rule.warnings(self.num_updates + 1, betas, float(of_fairseq["loss"])):
                logger.warning("Admin: %s", warning)
