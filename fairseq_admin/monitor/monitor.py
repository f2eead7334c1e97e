"""When a run is looked at, and where that is shown: fairseq's log, TensorBoard, Weights & Biases.

fairseq tells a model the number of updates before every batch, calls its `forward`, and after the last batch of an
update its `all_reduce_grads`. So the first batch of an update is measured, then the gradients of the whole of it, and
both are logged when the next update begins, in the aggregates of fairseq's trainer, which its progress bars read.

    β_{i,i} = sqrt( Var[f_i] / Var[ω_i x_{i-1} + f_i] )        Liu et al. 2020, section 4.1

is how much of a sub-layer's output is its own branch's. Post-LN normalises that sum and Pre-LN sums further; either
way the norm that follows divides by the root of the sum's variance. Schemes without norms have the share in the sum.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import metrics
from torch import Tensor, nn

from ..method.norms import ShortcutNorm
from ..method.schemes import layers_of, stacks_of
from ..method.sublayers import Sublayer, watch
from ..pytorch.omega import variance
from .divergence_rule import DivergenceRule

logger = logging.getLogger(__name__)

PRIORITY = 600
"""Where fairseq's log shows the values: after the gradient's norm, before the times."""


def first_rank() -> bool:
    """Whether this process is the one that logs."""
    return distributed_utils.get_global_rank() == 0


def gradient_norms(model: Any) -> dict[str, Tensor]:
    """The norm of the gradients of all weights ("model"), and of the layers of each stack, in float32.

    They are in fairseq's units of the moment: summed over tokens, and times the loss scale. What has none is left out.
    """
    parts: dict[str, nn.Module] = {side: nn.ModuleList(layers_of(stack)) for side, stack in stacks_of(model).items()}
    norms = {}
    for name, module in {"model": model, **parts}.items():
        weights = [weight for weight in module.parameters() if weight.grad is not None]
        each = [torch.linalg.vector_norm(weight.grad, dtype=torch.float32) for weight in weights]
        if each:
            norms[name] = torch.linalg.vector_norm(torch.stack(each))
    return norms


class StackProbe:
    """Measures ω of the sub-layers of one stack in its next forward, their branches' variance and their share β.

    Args:
        stack: an encoder or a decoder.
        tokens: what it is given. Shape (B, T).
        variances: whether to measure variances too, not ω alone.

    Attributes:
        whole: whether the stack's forward has come to its end; else it ran out of memory.
        left_out: the layers that have not run, as layerdrop has it.
    """

    def __init__(self, stack: Any, tokens: Tensor, variances: bool) -> None:
        self.variances = variances
        self.omegas: dict[str, Tensor] = {}
        self.branches: list[Tensor] = []
        self.sums: list[Tensor] = []
        self.whole = False
        self.left_out = set(range(len(layers_of(stack))))
        self.undo = contextlib.ExitStack()
        self.undo.callback(stack.register_forward_hook(self._end).remove)
        watch(stack, tokens, self._measure, self.undo)

    def _end(self, *_: Any) -> None:
        self.whole = True

    @torch.no_grad()
    def _measure(self, sublayer: Sublayer) -> None:
        self.left_out.discard(sublayer.layer)
        if isinstance(sublayer.norm, ShortcutNorm):
            self.omegas[sublayer.name] = sublayer.norm.omega.float()
        if self.variances:
            self.branches.append(variance(sublayer.scaled_branch, sublayer.real))
            self.sums.append(variance(sublayer.total, sublayer.real))

    def values(self) -> dict[str, Tensor]:
        """What was seen over the stack's sub-layers, each a scalar on the model's device."""
        values: dict[str, Tensor] = {}
        if self.omegas:
            omegas = torch.stack([*self.omegas.values()])
            values |= {"omega_min": omegas.min(), "omega_mean": omegas.mean(), "omega_max": omegas.max()}
        if self.branches:
            branches = torch.stack(self.branches)
            beta = (branches / torch.stack(self.sums)).sqrt()
            values |= {"beta_mean": beta.mean(), "beta_max": beta.max(), "branch_variance": branches.mean()}
        return values


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
        self.omegas: dict[str, dict[str, Tensor]] = {}
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

    def before_forward(self, model: Any, inputs: dict[str, Tensor]) -> None:
        """Call before every forward with the input of each stack, of shape (B, T)."""
        self._step_aside()
        if self.due and model.training and torch.is_grad_enabled():
            self.due = False
            stacks = stacks_of(model)
            self.probes = {side: StackProbe(stacks[side], tokens, self.thorough) for side, tokens in inputs.items()}

    def after_backward(self, model: Any) -> None:
        """Call when the gradients of an update are there, before they are clipped."""
        self.ended = True
        self._step_aside()
        if self.probes and self.thorough:
            self.norms = gradient_norms(model)

    def _step_aside(self) -> None:
        for probe in self.probes.values():
            probe.undo.close()

    def _forget(self) -> None:
        self._step_aside()
        self.probes, self.norms = {}, {}

    def _finish(self) -> None:
        """Read what was measured, in one wait for the device."""
        self._step_aside()
        for side, probe in self.probes.items():  # a layer that layerdrop left out has the ω that was last seen
            probe.omegas = self.omegas[side] = self.omegas.get(side, {}) | probe.omegas
        sides = [side for side, probe in self.probes.items() if not probe.left_out]
        seen = {f"{side}_{name}": it for side, probe in self.probes.items() for name, it in probe.values().items()}
        meters = {name: meter.val for name in ("gnorm", "loss") if (meter := metrics.get_meter("default", name))}
        if "model" in self.norms and meters.get("gnorm") is not None:
            # fairseq's own norm is of the gradient that the optimizer takes, before it is clipped.
            scale = torch.as_tensor(meters["gnorm"], device=self.norms["model"].device) / self.norms.pop("model")
            seen |= {f"{side}_gnorm": norm * scale for side, norm in self.norms.items()}
        self.probes, self.norms = {}, {}
        values = dict(zip(seen, torch.stack([value.float() for value in seen.values()]).tolist() if seen else []))
        self.shown = {name: float(f"{value:.4g}") for name, value in values.items()}
        # β hangs on which layers ran, so with some left out it says nothing of how it changed.
        shares = {side: values[f"{side}_beta_mean"] for side in sides if f"{side}_beta_mean" in values}
        if shares and meters.get("loss") is not None:
            for warning in self.rule.warnings(self.num_updates + 1, shares, float(meters["loss"])):
                logger.warning("Admin: %s", warning)
