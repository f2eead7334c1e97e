"""Does my depth train? How a new model's stacks react to noise in the weights, as Post-LN and with Admin.

    |F(x, W) - F(x, W*)|²     F: a stack's output, normalised; mean over its entries     Liu et al. 2020, section 4.2

W* is W with noise in every matrix, of 1% of the matrix's own deviation. With depth this grows as N for Post-LN and as
log N for Admin (figure 4). What it is after each sub-layer is what a stack cut off there would have.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .attaching import attach, attached
from .batch import call, one_batch
from .profiling import Batch, profile
from .trace import undisturbed

NOISE = 0.01
"""The deviation of the noise, as a share of the matrix's own."""
DRAWS = 3
TOKENS = 1024  # padded, at most: the outputs of all sub-layers are kept for the comparison

LIMIT = 0.001
"""The change up to which a stack may be expected to train: in docs/results.md Post-LN trains with 6 layers, whose
change is 0.00067, and stays on the plateau with 18, 0.0020; Admin is at 0.00063 with 48. The changes were measured at
one width and the trainings made at another: a hint, not a law."""

COPIES = (
    "No advice: layers start as copies of one another, as in nn.TransformerEncoder, whose change hardly grows with "
    "depth. Draw each layer's matrices, as nn.Transformer does with xavier_uniform_, and diagnose again."
)


@dataclass(frozen=True)
class Sublayer:
    """One site: its norm's name, its profiled ω, and the change of the norm's output at ω = 1 and at that ω."""

    norm: str
    omega: float
    post_ln: float
    admin: float


@dataclass(frozen=True)
class Diagnosis:
    """The sub-layers of every stack, in forward order, and whether layers are copies; `str` gives a table."""

    stacks: list[list[Sublayer]]
    copies: bool

    def __str__(self) -> str:
        rows = []
        for stack in self.stacks:
            rows.append((f"stack of {stack[0].norm}", "", f"{stack[-1].post_ln:.5f}", f"{stack[-1].admin:.5f}"))
            rows += [(f"  {s.norm}", f"{s.omega:.2f}", f"{s.post_ln:.5f}", f"{s.admin:.5f}") for s in stack]
        head = ("change of the output", "omega", "Post-LN", "Admin")
        width = max(len(row[0]) for row in [head, *rows])
        lines = [f"{name:{width}}  {omega:>6}  {post:>8}  {admin:>8}" for name, omega, post, admin in [head, *rows]]
        hints = [f"{stack[0].norm}: {advice(stack[-1])}" for stack in self.stacks]
        return "\n".join([*lines, *([COPIES] if self.copies else hints)])


def advice(last: Sublayer) -> str:
    """What to do, from the changes after a stack's last sub-layer."""
    if last.post_ln <= LIMIT:
        return f"Post-LN is within {LIMIT}: it may well train as it is."
    if last.admin <= LIMIT:
        return f"Post-LN is above {LIMIT} and may stay on a plateau, Admin is not: attach and profile before training."
    return f"both are above {LIMIT}: Admin may not be enough; try a lower learning rate or omega='constant' as well."


@torch.no_grad()
def perturb(model: nn.Module, relative: float, generator: torch.Generator) -> None:
    """Add noise to every matrix but embeddings, in place, of `relative` times the matrix's own deviation."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    for weight in model.parameters():
        if weight.dim() > 1 and weight not in embeddings:
            noise = torch.randn(weight.shape, generator=generator).to(weight)
            weight.add_(relative * weight.std(correction=0) * noise)


def outputs(model: nn.Module, samples: Batch) -> dict[str, Tensor]:
    """What the norm of every site of an attached model gives in evaluation mode, normalised. {norm: shape (R, C)}."""
    root, attachment = attached(model)
    states: dict[str, Tensor] = {}

    def keep(name: str, inputs: frozenset[str]) -> Callable[..., None]:
        def hook(norm: nn.Module, args: tuple, output: Tensor) -> None:
            real = samples.real(inputs, output)
            rows = output.flatten(0, -2).float()
            states[name] = functional.layer_norm(rows if real is None else rows[real], rows.shape[-1:])

        return hook

    with undisturbed(root) as undo:
        root.eval()
        for stack in attachment.stacks:
            for site in stack:
                undo.callback(site.norm.register_forward_hook(keep(site.name, stack[0].inputs)).remove)
        call(root, samples.first(samples.within(TOKENS)))
    return states


def changes(model: nn.Module, samples: Batch) -> dict[str, float]:
    """|F(x, W) - F(x, W*)|² after every site of an attached model, the mean of a few seeded draws."""
    before = outputs(model, samples)
    totals = dict.fromkeys(before, 0.0)
    for seed in range(DRAWS):
        moved = copy.deepcopy(model)
        perturb(moved, NOISE, torch.Generator().manual_seed(seed))
        for name, state in outputs(moved, samples).items():
            totals[name] += (state - before[name]).square().mean().item() / DRAWS
    return totals


@one_batch
def diagnose(model: nn.Module, batch: Any) -> Diagnosis:
    """Measure, on copies, how a new model reacts to noise as Post-LN and with Admin, and what ω would be.

    The model stays as it is, not attached. A decoder's change includes its encoder's. Under DDP every rank has to call.

    Args:
        model: not attached, and not trained yet.
        batch: what a forward takes (see `batch`).

    Raises:
        AdminError: what `attach` and `profile` refuse: Pre-LN, a trained model.
    """
    attempt = attach(copy.deepcopy(model), batch)
    omegas, samples = profile(attempt, batch), Batch(attempt, batch)
    admin = changes(attempt, samples)
    attachment = attached(attempt)[1]
    for site in attachment.sites:
        site.set_omega(1)
    post_ln = changes(attempt, samples)
    names = [[site.name for site in stack] for stack in attachment.stacks]
    rows = [[Sublayer(n, omegas[n].item(), post_ln[n], admin[n]) for n in stack] for stack in names]
    matrices = [weight for weight in model.parameters() if weight.dim() > 1 and weight.any()]
    distinct = {(weight.shape, weight.double().norm().item()) for weight in matrices}
    return Diagnosis(rows, len(distinct) < len(matrices))
