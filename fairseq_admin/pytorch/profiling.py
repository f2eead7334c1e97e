"""Profile an attached model: one pass over a batch, without gradients, with dropout as in training, sets ω."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AdminError
from .attaching import Attached, attached, refuse_trained
from .batch import arguments, by_name, one_batch
from .omega import StackMeasure, profile_stacks
from .sites import Site
from .trace import undisturbed

logger = logging.getLogger(__name__)
UNBATCHED = ("mask", "src_mask", "tgt_mask", "memory_mask")  # torch's attention masks: positions by positions
ENCODER = ("attention_mask", "src_key_padding_mask")
DECODER = ("decoder_attention_mask", "tgt_key_padding_mask", "labels")
"""Arguments that mark padding: by 0; torch's padding masks by 1; labels by -100, which cross entropy leaves out."""


class Batch:
    """The arguments of a model's forward. Sentences are along the first axis, or the axis of nn.MultiheadAttention.

    A model may take words (B, T) and transpose them for its layers. A padding mask (B, T) next to them shows that.
    """

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self.named, self.keywords = by_name(model, batch), isinstance(batch, Mapping)
        of_torch = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
        self.axis = self.given = int(not all(module.batch_first for module in of_torch))
        self.misfits: set[str] = set()  # masks whose shape has been warned of
        self.unbatched = UNBATCHED if of_torch else ()
        batched = [value for value in self.named.values() if isinstance(value, Tensor) and value.dim() > 1]
        first, *_ = [*batched, torch.empty(1, 1)]
        if not batched:
            logger.warning(
                "Admin: padding and all sentences are counted: none of %s is a tensor", ", ".join(self.named)
            )
        for mask in [self.named[name] for name in (*ENCODER, *DECODER) if self.named.get(name) is not None]:
            if first.shape[:2] == mask.shape != mask.shape[::-1]:
                self.given = 0
        self.sentences, self.length = first.size(self.given), first.size(1 - self.given)

    def first(self, sentences: int) -> Any:
        """The batch, cut to the first sentences."""
        cut = dict(self.named)
        for name, value in self.named.items():
            axis = 0 if name.endswith("key_padding_mask") else self.given
            batched = isinstance(value, Tensor) and name not in self.unbatched
            if batched and value.shape[axis : axis + 1] == (self.sentences,):
                cut[name] = value.narrow(axis, 0, sentences)
        return cut if self.keywords else tuple(cut.values())

    def real(self, inputs: set[str], x: Tensor) -> Tensor | None:
        """The indices of a stack's positions that are not padding. None: no usable mask, so all positions count.

        Args:
            inputs: the arguments on which the stack's input depends.
            x: the stack's activations for the first sentences. Shape (B, T, C) or (T, B, C).
        """
        decoder = any(name.startswith(("decoder_", "tgt", "labels")) for name in inputs)
        name = next((name for name in (DECODER if decoder else ENCODER) if self.named.get(name) is not None), "")
        if not name:
            return None
        mask = self.named[name][: x.size(self.axis)]
        real: Tensor = mask == 0 if "padding" in name else mask != (-100 if name == "labels" else 0)
        real = real.transpose(0, 1) if self.axis else real
        if real.shape == x.shape[:2]:
            return real.flatten().nonzero().squeeze(1)
        if name not in self.misfits:
            self.misfits.add(name)
            shapes = tuple(mask.shape), tuple(x.shape)
            logger.warning("Admin: padding is counted: %s has shape %s, what runs through the layers %s", name, *shapes)
        return None


@one_batch
def profile(model: nn.Module, batch: Any, *, rule: str = "reference", tokens: int = 8192) -> dict[str, Tensor]:
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
        tokens: the most padded tokens to use. The batch is cut to the first sentences that fit, at least one.

    Returns:
        ω by the name of the site's norm, in the order of `omegas`. A float32 scalar without a unit.

    Raises:
        AdminError: the model is not attached, or is trained; a site does not run; a variance is not finite.
    """
    root, attachment = attached(model)
    refuse_trained(attachment.sites)
    samples = Batch(root, batch)
    stacks = {f"stack of {stack[0].name}": stack for stack in attachment.stacks}
    attempt = partial(measure, root, attachment, samples, rule)
    most = max(1, min(samples.sentences, tokens // max(1, samples.length)))
    omega, sentences, summary = profile_stacks(stacks, attempt, most, from_first_rank)
    logger.info("Admin: profiled by rule %s on %d sentences: %s", rule, sentences, summary)
    return {site.name: value for site, value in zip(attachment.sites, omega)}


def from_first_rank(omega: Tensor) -> None:
    """Replace ω by the first rank's."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.broadcast(omega, 0)


def measure(root: nn.Module, attachment: Attached, samples: Batch, rule: str, sentences: int) -> Tensor:
    """ω of all stacks, one after the other, from the first sentences of a batch. Shape (S_1 + S_2 + ...,)."""
    measures: dict[Site, StackMeasure] = {}

    def observe(first: Site, site: Site, norm: nn.Module, inputs: tuple) -> None:
        x, total = (tensor.movedim(site.axis, -1) for tensor in (site.shortcut(inputs[0]), inputs[0]))
        real = samples.real(first.inputs, x)
        stack = measures.setdefault(first, StackMeasure(rule, real))
        stack.real = real  # a later site may have fewer positions
        omega = stack.add(x, total.float() - x.float())
        site.set_omega(omega)
        stack.omegas[-1] = omega if site.learned else torch.ones_like(omega)

    with undisturbed(root) as undo:
        root.train()
        for stack in attachment.stacks:
            for site in stack:
                hook = site.norm.register_forward_pre_hook(partial(observe, stack[0], site), prepend=True)
                undo.callback(hook.remove)
        # Copies of the buffers, because ω and running statistics change in the pass.
        buffers = {name: buffer.clone() for name, buffer in root.named_buffers()}
        torch.func.functional_call(root, buffers, *arguments(samples.first(sentences)))
    ran = sum(len(measured.omega()) for measured in measures.values())
    if ran != len(attachment.sites):  # a model may leave layers out at random
        raise AdminError(
            f"{ran} sub-layers ran in training mode; {len(attachment.sites)} did when the model was attached. "
            "Switch off what leaves layers out (stochastic depth) while you profile."
        )
    return torch.cat([measures[stack[0]].omega() for stack in attachment.stacks])
