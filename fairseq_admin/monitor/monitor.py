"""Measure a run while it trains, for fairseq's log, TensorBoard and Weights & Biases.

fairseq tells a model the number of updates before every batch, calls its `forward`, and calls its `all_reduce_grads`
after the last batch of an update. The monitor measures the first batch of an update, then the gradients of the whole
update. It logs both when the next update begins, in the aggregates of fairseq's trainer, which the progress bars read.

β_{i,i} (`sublayers.own_share`) is the square root of the branch's share in a sub-layer's sum. Post-LN normalises that
sum and Pre-LN adds to it; either way the next norm divides by the sum's deviation. A scheme without norms divides by
nothing, so there β describes the sum alone.
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
from ..method.profile_rules import variance
from ..method.schemes import layers_of, stacks_of
from ..method.sublayers import Sublayer, own_share, watch
from .divergence_rule import DivergenceRule

logger = logging.getLogger(__name__)

PRIORITY = 600
"""Place of the values in fairseq's log: after the gradient's norm, before the times."""


def gradient_norms(model: nn.Module) -> dict[str, Tensor]:
    """The norms of the gradients: of all weights ("model"), and of the layers of each stack.

    They are in fairseq's current units: summed over tokens, and times the loss scale.

    Args:
        model: after a backward.

    Returns:
        Scalars by name, float32. A part without gradients is left out.
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
    """Measures ω, the branches' variance and their share β in one stack's next forward.

    Args:
        stack: an encoder or a decoder.
        tokens: its input. Shape (B, T).
        variances: whether to measure variance and share too, or ω alone.

    Attributes:
        whole: whether the forward reached its end; if not, memory ran out.
        left_out: indices of the layers that layerdrop skipped.
    """

    def __init__(self, stack: Any, tokens: Tensor, variances: bool) -> None:
        self.variances = variances
        self.omegas: dict[str, Tensor] = {}
        self.branches: list[Tensor] = []
        self.shares: list[Tensor] = []
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
            self.shares.append(own_share(sublayer))

    def values(self) -> dict[str, Tensor]:
        """Compute statistics over the stack's sub-layers.

        Returns:
            Scalars by name, on the model's device: the smallest, mean and largest ω; the mean and largest β; the mean
            variance of a branch. Empty if nothing was measured.
        """
        values: dict[str, Tensor] = {}
        if self.omegas:
            omegas = torch.stack([*self.omegas.values()])
            values |= {"omega_min": omegas.min(), "omega_mean": omegas.mean(), "omega_max": omegas.max()}
        if self.branches:
            branches = torch.stack(self.branches)
            beta = torch.stack(self.shares).sqrt()
            values |= {"beta_mean": beta.mean(), "beta_max": beta.max(), "branch_variance": branches.mean()}
        return values


class Monitor:
    """Measures one model in training. Every rank has a monitor, but only the monitor of the first rank measures.

    Args:
        every: measure the first update and every `every`-th update. 0: measure nothing.
        thorough: also measure variances and gradients and warn of divergence; otherwise ω alone.
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
        """Forget every batch: the next one counts as the first of a run."""
        self.num_updates = -1
        self.due = self.ended = False

    def before_batch(self, num_updates: int) -> None:
        """Call before every batch.

        Args:
            num_updates: the number of updates so far.
        """
        if not self.every or distributed_utils.get_global_rank() != 0:
            return
        ended, self.ended = self.ended, False
        broken = not all(probe.whole for probe in self.probes.values())
        if num_updates == self.num_updates:
            if broken or ended and self.probes:
                # Memory ran out, or the update was skipped after an overflow: measure the next batch.
                self._forget()
                self.due = True
            return
        if broken:
            self._forget()
        elif self.probes:
            self._finish()
        # A measurement is logged with the next update, and fairseq logs after multiples of the interval. So measure
        # the update before a multiple.
        self.due = self.num_updates < 0 or (num_updates + 2) % self.every == 0
        self.num_updates = num_updates
        for name, value in self.shown.items():
            metrics.log_scalar(name, value, weight=0, priority=PRIORITY)

    def before_forward(self, model: nn.Module, inputs: dict[str, Tensor]) -> None:
        """Call before every forward.

        Args:
            model: the model in training.
            inputs: the input of each stack, by side. Shapes (B, T).
        """
        self._stop_watching()
        if self.due and model.training and torch.is_grad_enabled():
            self.due = False
            stacks = stacks_of(model)
            self.probes = {side: StackProbe(stacks[side], tokens, self.thorough) for side, tokens in inputs.items()}

    def after_backward(self, model: nn.Module) -> None:
        """Call after the last backward of an update, before the gradients are clipped.

        Args:
            model: the model in training, with its gradients.
        """
        self.ended = True
        self._stop_watching()
        if self.probes and self.thorough:
            self.norms = gradient_norms(model)

    def _stop_watching(self) -> None:
        for probe in self.probes.values():
            probe.undo.close()

    def _forget(self) -> None:
        self._stop_watching()
        self.probes, self.norms = {}, {}

    def _finish(self) -> None:
        """Read the measurements, in one wait for the device."""
        self._stop_watching()
        for side, probe in self.probes.items():  # for a layer that layerdrop skipped, keep the last ω
            probe.omegas = self.omegas[side] = self.omegas.get(side, {}) | probe.omegas
        sides = [side for side, probe in self.probes.items() if not probe.left_out]
        seen = {f"{side}_{name}": it for side, probe in self.probes.items() for name, it in probe.values().items()}
        meters = {name: meter.val for name in ("gnorm", "loss") if (meter := metrics.get_meter("default", name))}
        if "model" in self.norms and meters.get("gnorm") is not None:
            # fairseq's gnorm is in the optimizer's units, before clipping.
            scale = torch.as_tensor(meters["gnorm"], device=self.norms["model"].device) / self.norms.pop("model")
            seen |= {f"{side}_gnorm": norm * scale for side, norm in self.norms.items()}
        self.probes, self.norms = {}, {}
        values = dict(zip(seen, torch.stack([value.float() for value in seen.values()]).tolist() if seen else []))
        self.shown = {name: float(f"{value:.4g}") for name, value in values.items()}
        # β depends on which layers ran: with some skipped it cannot be compared.
        shares = {side: values[f"{side}_beta_mean"] for side in sides if f"{side}_beta_mean" in values}
        if shares and meters.get("loss") is not None:
            for warning in self.rule.warnings(self.num_updates + 1, shares, float(meters["loss"])):
                logger.warning("Admin: %s", warning)
