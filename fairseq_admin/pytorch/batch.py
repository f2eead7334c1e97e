"""What a model is given in one forward: its first sentences, and which positions are not padding."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

UNBATCHED = frozenset(["mask", "src_mask", "tgt_mask", "memory_mask"])
"""torch's masks of positions by positions."""

IGNORED = -100
"""The label that cross entropy, and so everyone, leaves out."""


class Batch:
    """The arguments of a model's forward.

    Sentences are along the first axis; where the model's nn.MultiheadAttention has them along the second, there.
    """

    def __init__(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.bound = inspect.signature(model.forward).bind(*args, **kwargs)
        extra = self.bound.arguments.get("kwargs", {})
        self.named = {**self.bound.arguments, **extra}
        attentions = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
        self.axis = int(any(not attention.batch_first for attention in attentions))
        first = next(value for value in self.named.values() if isinstance(value, Tensor) and value.dim() > 1)
        self.device = first.device
        self.sentences, self.length = first.size(self.axis), first.size(1 - self.axis)

    def first(self, sentences: int) -> tuple[tuple, dict[str, Any]]:
        """The arguments, positional and named, cut to the first sentences."""

        def cut(name: str, value: Any) -> Any:
            if isinstance(value, dict):
                return {key: cut(key, entry) for key, entry in value.items()}
            axis = 0 if name.endswith("key_padding_mask") else self.axis
            if not isinstance(value, Tensor) or name in UNBATCHED or value.dim() <= axis:
                return value
            return value.narrow(axis, 0, sentences) if value.size(axis) == self.sentences else value

        arguments = {name: cut(name, value) for name, value in self.bound.arguments.items()}
        bound = inspect.BoundArguments(self.bound.signature, arguments)  # type: ignore[arg-type]
        return bound.args, bound.kwargs

    def real(self, inputs: frozenset[str], x: Tensor) -> Tensor | None:
        """Which positions of a stack are not padding, as indices of its positions; None: all, as far as is known.

        Args:
            inputs: the arguments on which the stack depends.
            x: what runs through the stack. Shape (B, T, C) or (T, B, C), of the batch's first sentences.
        """
        side = "tgt_" if "tgt" in inputs else "src_" if "src" in inputs else ""
        decoder = any(name.startswith("decoder_") or name == "labels" for name in inputs)
        mask = self.named.get(f"{side}key_padding_mask") if side else None
        labels = self.named.get("labels")
        if mask is not None:
            real = mask == 0
        elif (mask := self.named.get("decoder_attention_mask" if decoder else "attention_mask")) is not None:
            real = mask != 0
        elif decoder and labels is not None and "input_ids" not in inputs:
            real = labels != IGNORED
        else:
            return None
        if real.dim() != 2 or x.dim() != 3:
            return None
        real = real[: x.size(self.axis)]
        real = real.t() if self.axis else real
        return real.flatten().nonzero().squeeze(1) if real.shape == x.shape[:2] else None
