"""What a model is given in one forward: its first sentences, and which positions are not padding."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

UNBATCHED = ("mask", "src_mask", "tgt_mask", "memory_mask")
"""torch's masks of positions by positions."""

IGNORED = -100
"""The label that cross entropy, and so everyone, leaves out."""


class Batch:
    """The arguments of a model's forward, by name.

    Sentences are along the first axis; where the model's nn.MultiheadAttention has them along the second, there.
    """

    def __init__(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.named = {**dict(zip(inspect.signature(model.forward).parameters, args)), **kwargs}
        attentions = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
        self.axis = int(any(not attention.batch_first for attention in attentions))
        first = next(value for value in self.named.values() if isinstance(value, Tensor) and value.dim() > 1)
        self.sentences, self.length = first.size(self.axis), first.size(1 - self.axis)

    def within(self, tokens: int) -> int:
        """How many sentences have at most so many padded tokens together; at least one."""
        return max(1, min(self.sentences, tokens // max(1, self.length)))

    def first(self, sentences: int) -> dict[str, Any]:
        """The arguments, cut to the first sentences."""

        def cut(name: str, value: Any) -> Any:
            axis = 0 if name.endswith("key_padding_mask") else self.axis
            batched = isinstance(value, Tensor) and name not in UNBATCHED and value.dim() > axis
            return value.narrow(axis, 0, sentences) if batched and value.size(axis) == self.sentences else value

        return {name: cut(name, value) for name, value in self.named.items()}

    def real(self, inputs: frozenset[str], x: Tensor) -> Tensor | None:
        """Which positions of a stack are not padding, as indices of its positions; None: all, as far as is known.

        Args:
            inputs: the arguments on which the stack's input depends.
            x: what runs through the stack. Shape (B, T, C) or (T, B, C), of the batch's first sentences.
        """
        real: Tensor | None = None
        if "src" in inputs or "tgt" in inputs:
            mask = self.named.get("tgt_key_padding_mask" if "tgt" in inputs else "src_key_padding_mask")
            real = None if mask is None else mask == 0
        elif "labels" not in inputs and not any(name.startswith("decoder_") for name in inputs):
            real = self.named.get("attention_mask")
        elif (real := self.named.get("decoder_attention_mask")) is None and "labels" in self.named:
            real = self.named["labels"] != IGNORED
        if real is None or real.dim() != 2 or x.dim() != 3:
            return None
        real = real[: x.size(self.axis)]
        real = real.t() if self.axis else real
        return real.flatten().nonzero().squeeze(1) if real.shape == x.shape[:2] else None
