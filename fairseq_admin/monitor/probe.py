"""What the sub-layers of a model show in one training forward: ω, the branch's variance, and the branch's share β.

    β_{i,i} = sqrt( Var[f_i] / Var[ω_i x_{i-1} + f_i] )        Liu et al. 2020, section 4.1

is how much of a sub-layer's output is its own branch's. Post-LN normalises that sum and Pre-LN sums further; either
way the norm that follows divides by the root of the sum's variance. Schemes without norms have the share in the sum.
"""

from __future__ import annotations

import contextlib
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..method.norms import ShortcutNorm
from ..method.sublayers import Sublayer, real_positions, watch
from ..pytorch.omega import variance


class StackProbe:
    """Measures the sub-layers of one stack in its next forward.

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
        self.whole = False
        self._undo = contextlib.ExitStack()
        self._undo.callback(stack.register_forward_hook(self._ended).remove)
        watch(stack, self._measure, self._undo)

    def _ended(self, *_: Any) -> None:
        self.whole = True

    def close(self) -> None:
        """Leave the stack as it was, wherever its forward has ended."""
        self._undo.close()

    @torch.no_grad()
    def _measure(self, sublayer: Sublayer) -> None:
        if isinstance(sublayer.norm, ShortcutNorm):
            self.omegas.append(sublayer.norm.omega.float())
        if self.variances:
            branch = sublayer.b * sublayer.branch.float()
            total = sublayer.a * sublayer.shortcut.float() + branch
            self.branches.append(variance(branch, self.real))
            self.sums.append(variance(total if sublayer.bottom is None else total + sublayer.bottom, self.real))

    @cached_property
    def real(self) -> Tensor:
        """The positions that are not padding, as `variance` takes them, of a sub-layer's tensors."""
        batch_first = getattr(self.stack, "batch_first", False)  # of fast stacks, which know it once they run
        return real_positions(self.tokens, self.stack.padding_idx, batch_first)

    def values(self) -> dict[str, Tensor]:
        """What was seen over the stack's sub-layers, each a scalar on the model's device."""
        values: dict[str, Tensor] = {}
        if self.omegas:
            omegas = torch.stack(self.omegas)
            values |= {"omega_min": omegas.min(), "omega_mean": omegas.mean(), "omega_max": omegas.max()}
        if self.branches:
            branches = torch.stack(self.branches)
            beta = (branches / torch.stack(self.sums)).sqrt()
            values |= {"beta_mean": beta.mean(), "beta_max": beta.max(), "branch_variance": branches.mean()}
        return values
