"""ω of an attached model from one batch: one pass without gradients, dropout as in training.

The pass changes nothing in the model but ω: random state, modes and autocast's cache are what they would have been.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AdminError
from .attaching import attached, refuse_trained, set_omega, shortcut_at
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
        {norm: ω}, a scalar each, in forward order.

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
    given, stacks = Batch(root, args, batch), found.stacks()
    sentences = max(1, min(given.sentences, tokens // max(1, given.length)))
    omega = torch.full((len(found.sites),), float("nan"), device=given.device)
    failure: Exception | None = None
    try:
        omega = within_memory(lambda count: measure(root, stacks, given, count, rule), sentences)
    except Exception as error:  # after the broadcast, which every rank has to reach
        failure = error
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.broadcast(omega, 0)
    if failure is not None and not torch.isfinite(omega).all():
        raise failure
    parts = omega.split([len(stack) for stack in stacks])
    ranges = [omega_range(f"stack of {stack[0].norm}", part) for stack, part in zip(stacks, parts)]
    for stack, part in zip(stacks, parts):
        set_omega(root, stack, part)
    logger.info("Admin: profiled by rule %s on %d sentences: %s", rule, sentences, "; ".join(ranges))
    values = {site.norm: value for stack, part in zip(stacks, parts) for site, value in zip(stack, part)}
    return {site.norm: values[site.norm] for site in found.sites}


@contextlib.contextmanager
def every_layer(model: nn.Module) -> Iterator[None]:
    """Training mode, but no layerdrop and no running statistics."""
    dropping: dict[Any, float] = {m: m.layerdrop for m in model.modules() if getattr(m, "layerdrop", 0)}  # type: ignore
    try:
        model.train()
        for module in dropping:
            module.layerdrop = 0.0
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.eval()
        yield
    finally:
        for module, share in dropping.items():
            module.layerdrop = share


def measure(root: nn.Module, stacks: list[list[Site]], given: Batch, sentences: int, rule: str) -> Tensor:
    """ω of all stacks from the first sentences of a batch, one stack after the other. Shape (S_1 + S_2 + ...,).

    Every ω of the model is 1 afterwards.
    """
    measures: dict[str, StackMeasure] = {}

    def observer(stack: list[Site], site: Site):  # noqa: ANN202
        first = stack[0]

        def observe(norm: nn.Module, inputs: tuple) -> None:
            x, total = shortcut_at(norm).tensor, inputs[0]
            assert x is not None
            if site is first:
                measures[first.norm] = StackMeasure(rule, given.real(first.inputs, x))
            exact = torch.promote_types(total.dtype, torch.float32)
            set_omega(root, [site], [measures[first.norm].add(x, total.to(exact) - x.to(exact))])

        return observe

    args, kwargs = given.first(sentences)
    handles = [
        root.get_submodule(site.norm).register_forward_pre_hook(observer(stack, site), prepend=True)
        for stack in stacks
        for site in stack
    ]
    try:
        with undisturbed(root), every_layer(root):
            root(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
        for stack in stacks:
            set_omega(root, stack, torch.ones(len(stack)))
    for stack in stacks:
        runs = len(measures[stack[0].norm].omegas) if stack[0].norm in measures else 0
        if runs != len(stack):
            raise AdminError(
                f"{runs} sub-layers of the stack of {stack[0].norm} ran; {len(stack)} were expected, as in the batch "
                "that attach was given."
            )
    return torch.cat([measures[stack[0].norm].omega() for stack in stacks])
