"""What the sub-layers of a model show in one training forward: ω, the branch's variance, and the branch's share β.

    β_{i,i} = sqrt( Var[f_i] / Var[ω_i x_{i-1} + f_i] )        Liu et al. 2020, section 4.1

is how much of a sub-layer's output is its own branch's. Post-LN normalises that sum and Pre-LN sums further; either
way the norm that follows divides by the root of the sum's variance. Schemes without norms have the share in the sum.

fairseq's layers hand every branch and its shortcut to `residual_connection`. A probe stands in front of it for one
forward and then steps aside, so activation checkpointing, which computes a layer once more, is measured once.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..method.norms import BottomNorm, ShortcutNorm
from ..method.schemes import SUBLAYER_NORMS, layers_of
from ..pytorch.omega import variance


class StackProbe:
    """Measures the sub-layers of one stack as they run, each once.

    Args:
        stack: an encoder or a decoder.
        tokens: what it is given. Shape (B, T).
        variances: whether to measure variances too, not ω alone.

    Attributes:
        whole: whether the stack's forward has come to its end; else it ran out of memory.
    """

    def __init__(self, stack: Any, tokens: Tensor, variances: bool) -> None:
        self.stack, self.tokens, self.variances = stack, tokens, variances
        self.omegas: list[Tensor] = []
        self.branches: list[Tensor] = []
        self.sums: list[Tensor] = []
        self.waiting: list[Any] = []
        self.whole = False
        self._end = stack.register_forward_hook(self._ended)
        for layer in layers_of(stack):
            self._stand_before(layer)

    def _stand_before(self, layer: Any) -> None:
        norms = [layer._modules[name] for name in SUBLAYER_NORMS if layer._modules.get(name) is not None]
        rest = iter(norms)

        def residual_connection(branch: Tensor, shortcut: Tensor) -> Any:
            summed = type(layer).residual_connection(layer, branch, shortcut)
            norm = next(rest)
            self._measure(layer, norm, branch, summed)
            if norm is norms[-1]:
                self._step_aside(layer)
            return summed

        layer.residual_connection = residual_connection
        self.waiting.append(layer)

    def _step_aside(self, layer: Any) -> None:
        del layer.residual_connection
        self.waiting.remove(layer)

    def _ended(self, *_: Any) -> None:
        self.whole = True

    def close(self) -> None:
        """Step aside where a layer has not run: layerdrop skips some, and a batch may have run out of memory."""
        self._end.remove()
        for layer in list(self.waiting):
            self._step_aside(layer)

    @torch.no_grad()
    def _measure(self, layer: Any, norm: Any, branch: Tensor, summed: Any) -> None:
        if isinstance(norm, ShortcutNorm):
            self.omegas.append(norm.omega.float())
        if not self.variances:
            return
        branch = branch.float()
        if isinstance(norm, ShortcutNorm):
            summed = summed[1].float() * self.omegas[-1] + branch
        elif isinstance(norm, BottomNorm):
            assert norm.bottom is not None
            summed = summed.float() + norm.bottom
        if getattr(layer, "branch_scale", None) is not None:
            branch = branch * layer.branch_scale
        self.branches.append(variance(branch, self.real))
        self.sums.append(variance(summed, self.real))

    @cached_property
    def real(self) -> Tensor:
        """The positions that are not padding, as `variance` takes them, of a sub-layer's tensors."""
        real = self.tokens.ne(self.stack.padding_idx)
        batch_first = getattr(self.stack, "batch_first", False)  # of fast stacks, which know it once they run
        return (real if batch_first else real.t()).flatten().nonzero().squeeze(1)

    def values(self) -> dict[str, Tensor]:
        """What was seen over the stack's sub-layers, each a scalar on the model's device."""
        found: dict[str, Tensor] = {}
        if self.omegas:
            omegas = torch.stack(self.omegas)
            found |= {"omega_min": omegas.min(), "omega_mean": omegas.mean(), "omega_max": omegas.max()}
        if self.branches:
            branches = torch.stack(self.branches)
            beta = (branches / torch.stack(self.sums)).sqrt()
            found |= {"beta_mean": beta.mean(), "beta_max": beta.max(), "branch_variance": branches.mean()}
        return found
