"""ω of an attached model from one batch: one pass without gradients, dropout as in training.

The pass changes nothing in the model but ω: random state, modes and autocast's cache are what they would have been.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AdminError
from .attaching import attached, refuse_trained, set_omega
from .batch import Batch
from .omega import StackMeasure, omega_range, within_memory
from .sites import Site
from .trace import undisturbed

logger = logging.getLogger(__name__)


def profile(
    model: nn.Module, *args: Any, rule: str = "reference", tokens: int = 8192, **batch: Any
) -> dict[str, Tensor]:
    """Set every ω of an attached model from one training batch; under DDP, rank 0's on every rank, each of which calls.

    Padding is left out of the variances where the batch has an attention mask (or torch's key padding mask); of a
    decoder without one, where labels are -100.

    Args:
        model: attached, and not trained yet.
        args, batch: what a forward takes.
        rule: "reference", as the authors' code, or "paper" (see `omega`).
        tokens: padded tokens to use at most; the batch's first sentences that fit are used, at least one.

    Returns:
        {norm: ω}, a scalar each, in forward order of each stack.

    Raises:
        AdminError: the model is not attached, or not fresh; a site does not run once; a variance is not finite.
    """
    root, found = attached(model)
    if found.rule != "profile" or rule not in ("reference", "paper"):
        raise AdminError(
            f"rule={rule!r} of a model attached with omega={found.rule!r}; expected 'reference' or 'paper', and "
            "'profile'."
        )
    refuse_trained(root, found.sites)
    given = Batch(root, args, batch)
    omega = torch.full((len(found.sites),), float("nan"), device=next(root.parameters()).device)
    failure: Exception | None = None
    try:
        omega = within_memory(lambda count: measure(root, found.stacks, given, count, rule), given.within(tokens))
    except Exception as error:  # after the broadcast, which every rank has to reach
        failure = error
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.broadcast(omega, 0)
    if failure is not None and not torch.isfinite(omega).all():
        raise failure
    parts = omega.split([len(stack) for stack in found.stacks])
    ranges = [omega_range(f"stack of {stack[0].norm}", part) for stack, part in zip(found.stacks, parts)]
    set_omega(root, found.sites, omega)
    sentences = given.within(tokens)
    logger.info("Admin: profiled by rule %s on at most %d sentences: %s", rule, sentences, "; ".join(ranges))
    return {site.norm: value for site, value in zip(found.sites, omega)}


def measure(root: nn.Module, stacks: list[list[Site]], given: Batch, sentences: int, rule: str) -> Tensor:
    """ω of all stacks from the first sentences of a batch, one stack after the other. Shape (S_1 + S_2 + ...,).

    The forward runs on copies of the buffers, which are ω and running statistics, and without layerdrop.
    """
    measures: dict[Site, StackMeasure] = {}

    def observe(first: Site, site: Site, norm: nn.Module, inputs: tuple) -> None:
        total = inputs[0]
        assert site.shortcut is not None
        x = site.shortcut.reshape(total.shape)
        if site is first:
            measures[first] = StackMeasure(rule, given.real(first.inputs, x))
        exact = torch.promote_types(total.dtype, torch.float32)
        set_omega(root, [site], [measures[first].add(x, total.to(exact) - x.to(exact))])

    dropping: dict[Any, float] = {m: m.layerdrop for m in root.modules() if getattr(m, "layerdrop", 0)}  # type: ignore
    handles = [
        root.get_submodule(site.norm).register_forward_pre_hook(partial(observe, stack[0], site), prepend=True)
        for stack in stacks
        for site in stack
    ]
    try:
        with undisturbed(root):
            root.train()
            for module in dropping:
                module.layerdrop = 0.0
            buffers = {name: buffer.clone() for name, buffer in root.named_buffers()}
            torch.func.functional_call(root, buffers, (), given.first(sentences))
    finally:
        for handle in handles:
            handle.remove()
        for module, share in dropping.items():
            module.layerdrop = share
    runs = sum(len(measured.omegas) for measured in measures.values())
    if runs != sum(map(len, stacks)):
        raise AdminError(f"{runs} sub-layers ran; {sum(map(len, stacks))} did with the batch that attach was given.")
    return torch.cat([measures[stack[0]].omega() for stack in stacks])
