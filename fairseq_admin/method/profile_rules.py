"""The rules of the paper: from the branches' variances on a batch to shortcut scales ω.

A Post-LN sub-layer i of a stack of S sub-layers computes (Liu et al. 2020, section 4.3)

    x_i = LN_i( x_{i-1} ⊙ ω_i + f_i(x_{i-1}) )

with x_0 the stack's input and f_i the branch (attention or feed-forward, after its dropout). Every rule below gives one
scalar per sub-layer; training turns it into a vector of C channels.

    T time   B batch   C channels   S sub-layers
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import AdminError


def variance(x: Tensor, real: Tensor | None) -> Tensor:
    """One variance over all channels of all real positions, in float32.

    Args:
        x: activations. Shape (T, B, C) or (T·B, C), any floating type.
        real: indices, in T·B, of the positions that are not padding. Shape (R,), int64. None: all are real. (A mask
            would have to be turned into indices, and wait for the device, at every call.)

    Returns:
        Var[x], a scalar on x's device; NaN if no position is real.
    """
    values = x.float() if real is None else x.flatten(0, -2).index_select(0, real).float()
    # Two passes are as accurate as torch.var and, on a CPU, twice as fast.
    return (values - values.mean()).square_().mean()


def next_omega(omega: Tensor, shortcut_variance: Tensor, branch_variance: Tensor) -> Tensor:
    """Rule `reference`: ω of sub-layer i+1 from the variances of the two terms that sub-layer i sums.

        ω_1 = 1,   ω_{i+1}² = Var[ω_i x_{i-1}] + Var[f_i]

    Each ω is in place before the next branch is measured, as in the authors' released code, which gave the published
    numbers. That code also counts padding and trains ω_1, and its weight decay pulls ω to 0, not to the profiled value.

    Args:
        omega: ω_i, a scalar.
        shortcut_variance: Var[x_{i-1}], before scaling.
        branch_variance: Var[f_i].

    Returns:
        ω_{i+1}, a scalar.
    """
    return torch.sqrt(omega**2 * shortcut_variance + branch_variance)


def omega_from_variances(branch_variances: Tensor, input_variance: Tensor) -> Tensor:
    """Rule `paper`: shortcut scales that bound each branch's share of a Post-LN output.

        ω_1 = 1,   ω_i² = Var[x_0] + Σ_{j<i} Var[f_j]  (i > 1)

    Liu et al. 2020, section 4.3, completed: the paper's sum lacks Var[x_0], and without it ω_1 would be 0.

    Args:
        branch_variances: Var[f_j] with every ω = 1, in forward order. Shape (S,), one stack.
        input_variance: Var[x_0] of the stack's input, a scalar.

    Returns:
        ω, shape (S,). It multiplies the shortcut, never the branch.
    """
    omega = (input_variance + branch_variances.cumsum(0) - branch_variances).sqrt()
    omega[0] = 1.0
    return omega


class StackMeasure:
    """The variances of one stack's sub-layers, measured in forward order, and their ω by a rule.

    Args:
        rule: "reference" or "paper".
        real: see `variance`.

    Raises:
        AdminError: there is no such rule, or no position is real.
    """

    def __init__(self, rule: str, real: Tensor | None) -> None:
        if rule not in ("reference", "paper"):
            raise AdminError(f"rule={rule!r}; expected 'reference' or 'paper'.")
        if real is not None and not len(real):
            raise AdminError(
                "the batch is all padding to a stack; expected words to profile on. Profile on another batch."
            )
        self.rule = rule
        self.real = real
        self.omegas: list[Tensor] = []
        self.shortcut_variances: list[Tensor] = []
        self.branch_variances: list[Tensor] = []

    def add(self, shortcut: Tensor, branch: Tensor) -> Tensor:
        """Measure the next sub-layer. Returns its ω, a scalar.

        Args:
            shortcut: x_{i-1}, before scaling. Shape (T, B, C).
            branch: f_i. Shape (T, B, C).
        """
        omega = torch.ones((), device=branch.device)
        if self.omegas and self.rule == "reference":
            omega = next_omega(self.omegas[-1], self.shortcut_variances[-1], self.branch_variances[-1])
        self.shortcut_variances.append(variance(shortcut, self.real))
        self.branch_variances.append(variance(branch, self.real))
        self.omegas.append(omega)
        return omega

    def omega(self) -> Tensor:
        """ω of every sub-layer, once the pass is over. Shape (S,), float32."""
        if self.rule == "paper":
            return omega_from_variances(torch.stack(self.branch_variances), self.shortcut_variances[0])
        return torch.stack(self.omegas)


def omega_range(stack: str, omega: Tensor) -> str:
    """Describe a stack and its ω, of shape (S,), in a line for the log.

    Raises:
        AdminError: an ω is not a finite number.
    """
    bad = (~torch.isfinite(omega)).nonzero()
    if len(bad):
        raise AdminError(
            f"profiling measured {omega[bad[0]].item()} for omega at sub-layer {bad[0].item() + 1} of the {stack}; a "
            "finite number was expected. The model overflows on its first batch (or rank 0 failed: see its log); "
            "check the embeddings given, or train in fp32."
        )
    return f"{stack} {len(omega)} sub-layer{'s' * (len(omega) > 1)}, omega {omega.min():.3f} to {omega.max():.3f}"


def profile_stacks(
    stacks: Mapping[str, Sequence[Any]],
    measure: Callable[[], Tensor],
    from_first_rank: Callable[[Tensor], object],
) -> tuple[Tensor, str]:
    """Measure every ω, and set it to the first rank's value. Every rank has to call this.

    Args:
        stacks: the sub-layers of each stack, by name; each has `omega` and `set_omega`.
        measure: returns the ω of all stacks.
        from_first_rank: broadcasts a tensor, in place.

    Returns:
        ω, shape (S_1 + S_2 + ...,), and the text for the log.

    Raises:
        AdminError: an ω is not a finite number. No ω is set then.
    """
    sublayers = [sublayer for stack in stacks.values() for sublayer in stack]
    omega, failure = torch.full((len(sublayers),), math.nan, device=sublayers[0].omega.device), None
    try:
        omega = measure()
    except Exception as error:  # raised after the broadcast, which every rank has to reach
        failure = error
    from_first_rank(omega)
    if failure is not None and not torch.isfinite(omega).all():
        raise failure
    summary = "; ".join(map(omega_range, stacks, omega.split([len(stack) for stack in stacks.values()])))
    for sublayer, value in zip(sublayers, omega, strict=True):
        sublayer.set_omega(value)
    return omega, summary
