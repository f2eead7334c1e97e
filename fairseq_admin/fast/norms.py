"""ω of every sub-layer of a stack by one operation; the plain norms add up their own, one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..method.norms import ShortcutNorm
from .plain import Fast


class FastShortcutNorm(Fast, ShortcutNorm):
    """LN(shortcut ⊙ ω + branch), with ω from its stack while that runs.

    Attributes:
        summed: that ω. Shape (C,).
    """

    summed: Tensor | None = None

    @property
    def omega(self) -> Tensor:
        """ω as the forward uses it. Shape (C,)."""
        return super().omega if self.summed is None else self.summed


@contextlib.contextmanager
def omega_together(norms: list[FastShortcutNorm]) -> Iterator[None]:
    """Within this context, a stack's forward, these norms have ω = omega_init + omega_delta from one operation.

    A layer that is computed again in the backward (--checkpoint-activations) adds up its own, which is the same.
    """
    if not norms:
        yield
        return
    deltas: list[Any] = [norm.omega_delta for norm in norms]
    try:
        for norm, omega in zip(norms, torch._foreach_add([norm.omega_init for norm in norms], deltas)):
            vars(norm)["summed"] = omega  # nn.Module's own way to set an attribute costs more than the sum
        yield
    finally:
        for norm in norms:
            vars(norm).pop("summed", None)
