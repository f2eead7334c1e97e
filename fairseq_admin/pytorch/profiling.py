"""Profile an attached model: one pass over a batch, without gradients, with dropout as in training, sets ω."""

from __future__ import annotations

import logging
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.undisturbed import undisturbed
from ..errors import AdminError
from ..method.profile_rules import StackMeasure, profile_stacks
from .attaching import Attached, attached, refuse_trained
from .batch import arguments, by_name
from .sites import Site

logger = logging.getLogger(__name__)
ENCODER = ("attention_mask", "src_key_padding_mask", "key_padding_mask")
DECODER = ("decoder_attention_mask", "tgt_key_padding_mask", "labels")
"""Arguments that mark padding: by 0; torch's padding masks by 1; labels by -100, which cross entropy leaves out."""


def real_positions(masks: dict[str, Any], batch_first: bool, decoder: bool, shape: torch.Size) -> Tensor | None:
    """The indices of the positions that are not padding. None: the batch has no usable mask, so all positions count.

    Args:
        masks: the arguments of the model's forward, by name.
        batch_first: whether activations have shape (B, T, C), or (T, B, C).
        decoder: whether the positions are a decoder's.
        shape: the first two sizes of the activations.
    """
    name = next((name for name in (DECODER if decoder else ENCODER) if masks.get(name) is not None), "")
    if not name:
        return None
    mask = masks[name]
    # A mask may be an object that is no tensor, and compares to one bool.
    real = torch.as_tensor(mask == 0 if "padding" in name else mask != (-100 if name == "labels" else 0))
    real = real if batch_first or real.dim() < 2 else real.transpose(0, 1)
    if real.shape == shape:
        return real.flatten().nonzero().squeeze(1)
    shapes = tuple(real.shape), tuple(shape)
    logger.warning("Admin: padding is counted: %s has shape %s, expected %s as in the layers", name, *shapes)
    return None


def profile(model: nn.Module, batch: Any, *, rule: str = "reference") -> dict[str, Tensor]:
    """Set every ω of an attached model from one training batch, as the paper does (Liu et al. 2020, section 4.3).

    The variances leave out padding if the batch has an attention mask or torch's key padding mask. A decoder without a
    mask leaves out positions with labels of -100.

        >>> batch = torch.randn(4, 7, 16)
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        >>> model = admin.attach(torch.nn.TransformerEncoder(layer, 3), batch)
        >>> omega = admin.profile(model, batch)
        >>> len(omega), omega["layers.0.norm1"].item(), (omega["layers.2.norm2"] > omega["layers.0.norm2"]).item()
        (6, 1.0, True)

    Args:
        model: attached, and not trained yet. Under DDP every rank has to call, and all get rank 0's ω.
        batch: the arguments of a forward (see `batch`).
        rule: "reference", the authors' code, or "paper", the paper's text (see `omega`).

    Returns:
        ω by the name of the site's norm, in the order of `omegas`. A float32 scalar without a unit.

    Raises:
        AdminError: the model is not attached, or is trained; a site does not run; a variance is not finite.
    """
    root, attachment = attached(model)
    refuse_trained(attachment.sites)
    stacks = {f"stack of {stack[0].name}": stack for stack in attachment.stacks}
    omega, summary = profile_stacks(stacks, partial(measure, root, attachment, batch, rule), from_first_rank)
    logger.info("Admin: profiled by rule %s: %s", rule, summary)
    return {site.name: value for site, value in zip(attachment.sites, omega)}


def from_first_rank(omega: Tensor) -> None:
    """Replace ω by the first rank's."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.broadcast(omega, 0)


def measure(root: nn.Module, attachment: Attached, batch: Any, rule: str) -> Tensor:
    """ω of all stacks, one after the other, from a batch. Shape (S_1 + S_2 + ...,)."""
    measures: dict[Site, StackMeasure] = {}
    named = by_name(root, batch)
    if not any(isinstance(value, Tensor) for value in named.values()):
        logger.warning("Admin: padding is counted: none of %s is a tensor", ", ".join(named))
    batch_first = all(module.batch_first for module in root.modules() if isinstance(module, nn.MultiheadAttention))
    positions = cache(partial(real_positions, named, batch_first))

    def observe(first: Site, site: Site, norm: nn.Module, inputs: tuple) -> None:
        x, total = (tensor.movedim(site.axis, -1) for tensor in (site.shortcut(inputs[0]), inputs[0]))
        decoder = any(name.startswith(("decoder_", "tgt", "labels")) for name in first.inputs)
        real = positions(decoder, x.shape[:2])
        stack = measures.setdefault(first, StackMeasure(rule, real))
        stack.real = real  # a later site may have fewer positions
        omega = stack.add(x, total.float() - x.float())
        site.set_omega(omega)
        stack.omegas[-1] = omega if site.learned else torch.ones_like(omega)

    with undisturbed(root) as undo:
        root.train()
        for attributes in map(vars, root.modules()):
            if "layerdrop" in attributes:
                undo.callback(attributes.update, layerdrop=attributes["layerdrop"])
                attributes["layerdrop"] = 0.0
        for stack in attachment.stacks:
            for site in stack:
                hook = site.norm.register_forward_pre_hook(partial(observe, stack[0], site), prepend=True)
                undo.callback(hook.remove)
        # Copies of the buffers, because ω and running statistics change in the pass.
        buffers = {name: buffer.clone() for name, buffer in root.named_buffers()}
        torch.func.functional_call(root, buffers, *arguments(batch))
    ran = sum(len(measured.omega()) for measured in measures.values())
    if ran != len(attachment.sites):  # a model may leave layers out at random
        raise AdminError(
            f"{ran} sub-layers ran in training mode; {len(attachment.sites)} were expected, one for each omega. Switch "
            "off what leaves layers out (stochastic depth) while you profile; profile no layer that runs twice."
        )
    return torch.cat([measures[stack[0]].omega() for stack in attachment.stacks])
