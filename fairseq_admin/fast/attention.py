"""Attention with one packed projection and torch's scaled_dot_product_attention; twin: fairseq's MultiheadAttention.

    T target time   S source time   B batch   H heads   D channels a head   C = H · D channels

fairseq's encoder-attention leaves torch's kernels in training, every layer makes its masks again, and time comes first
in its tensors, which the kernels then copy. Here masks are objects that a stack makes once a batch, and next to one
tensors are batch-first. A mask of any other kind is the twin's, and so are incremental decoding and a wish for weights.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn
from torch.nn import functional

from .linear import packed_linear, put_together
from .pieces import Ends, able
from .products import SHORT, by_products
from .twin import Fast


class Mask:
    """What no position sees; of this class itself, nothing is hidden."""

    def bias(self, heads: int, like: Tensor) -> Tensor | None:
        """0 or -inf, to add to the scores. Shape (B · H or 1, T or 1, S)."""
        return None

    def kernel_options(self) -> dict[str, Any]:
        """As scaled_dot_product_attention takes it."""
        return {}

    def for_twin(self, like: Tensor) -> dict[str, Tensor]:
        """As the twin takes it."""
        return {}


class Causal(Mask):
    """Position t sees positions up to t.

    Padding, if it follows the words, is hidden from them by that alone.

    Args:
        length: T.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._bias: Tensor | None = None

    def bias(self, heads: int, like: Tensor) -> Tensor:
        """Shape (1, T, T)."""
        if self._bias is None or self._bias.dtype != like.dtype:
            self._bias = like.new_full((1, self.length, self.length), -math.inf).triu(1)
        return self._bias

    def kernel_options(self) -> dict[str, Any]:
        return {"is_causal": True}

    def for_twin(self, like: Tensor) -> dict[str, Tensor]:
        return {"attn_mask": self.bias(1, like)[0]}


class Padding(Mask):
    """No position sees padding.

    Args:
        hidden: where padding is. Shape (B, S), bool.
    """

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden
        self._bias: Tensor | None = None
        self._seen: Tensor | None = None

    def bias(self, heads: int, like: Tensor) -> Tensor:
        """Shape (B · H, 1, S)."""
        if self._bias is None or self._bias.dtype != like.dtype or len(self._bias) != heads * len(self.hidden):
            bias = torch.zeros_like(self.hidden, dtype=like.dtype).masked_fill_(self.hidden, -math.inf)
            self._bias = bias.repeat_interleave(heads, 0).unsqueeze(1)
        return self._bias

    def kernel_options(self) -> dict[str, Any]:
        if self._seen is None:
            self._seen = ~self.hidden[:, None, None]
        return {"attn_mask": self._seen}

    def for_twin(self, like: Tensor) -> dict[str, Tensor]:
        return {"key_padding_mask": self.hidden}


def by_kernel(mask: Mask, p: float, *packed: Tensor) -> Tensor:
    """softmax(q kᵀ / sqrt(D)) v, with dropout behind the softmax.

    Args:
        mask: what is not seen.
        p: the chance to drop.
        packed: queries, keys and values, several to a tensor. Shape (B, T or S, number in this tensor, H, D).

    Returns:
        Shape (B, T, C).
    """
    parts = (several.unbind(2) if several.size(2) > 1 else [several.squeeze(2)] for several in packed)
    q, k, v = (each.transpose(1, 2) for several in parts for each in several)
    mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=p, **mask.kernel_options())
    return mixed.transpose(1, 2).flatten(2)


class FastAttention(Ends, Fast, MultiheadAttention):
    """fairseq's attention, its parameters and their names unchanged; those that are packed share a storage."""

    onednn: bool = False
    """Whether projections go through oneDNN."""

    def put_together(self) -> None:
        """Store the projections of one input so that packing them copies nothing."""
        packed = [*([self.q_proj] if self.self_attention else []), self.k_proj, self.v_proj]
        for name in ("weight", "bias"):
            parts = [it._parameters.get(name) for it in packed]  # nothing there: --ddp-backend fully_sharded has them
            if all(isinstance(part, nn.Parameter) for part in parts):
                put_together(parts)

    def _apply(self, *args: Any, **kwargs: Any) -> FastAttention:
        """As every module's, which moves and casts parameters one by one."""
        super()._apply(*args, **kwargs)
        self.put_together()
        return self

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Any = None,
        incremental_state: Any = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Any = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As fairseq's; or one of the masks is an object of this module and tensors are batch-first."""
        mask = key_padding_mask if attn_mask is None else attn_mask
        asked = {"before_softmax": before_softmax, "need_head_weights": need_head_weights}
        if not isinstance(mask, Mask):
            return super().forward(
                query, key, value, key_padding_mask, incremental_state, need_weights, static_kv, attn_mask, **asked
            )
        if self.plain or need_weights or any(asked.values()):
            given = [None if it is None else it.transpose(0, 1) for it in (query, key, value)]
            out, weights = super().forward(
                *given, need_weights=need_weights, static_kv=static_kv, **asked, **mask.for_twin(query)
            )
            return out.transpose(0, 1), weights
        dropping = self.training or self.dropout_module.apply_during_inference
        p = self.dropout_module.p if dropping else 0.0
        if self.self_attention:
            sides: list[Any] = [(query, (self.q_proj, self.k_proj, self.v_proj))]
        else:
            assert key is not None
            sides = [(query, (self.q_proj,)), (key, (self.k_proj, self.v_proj))]
        if able(query) and p < 1 and (p > 0 or sides[-1][0].size(1) <= SHORT):
            branch = by_products(mask, p, self.onednn, self.num_heads, sides, self.out_proj)
            return self.given_on(branch), None
        return self.out_proj(by_kernel(mask, p, *(self._packed(x, *of) for x, of in sides))), None

    def _packed(self, x: Tensor, *projections: Any) -> Tensor:
        """Several linear layers of one input as one. Shapes (B, T, C) and (B, T, number of layers, H, D)."""
        packed = packed_linear(self.onednn, x, *(it.weight for it in projections), *(it.bias for it in projections))
        return packed.view(*x.shape[:2], len(projections), self.num_heads, self.head_dim)
