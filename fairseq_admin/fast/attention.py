"""Attention with one packed projection and torch's scaled_dot_product_attention; twin: fairseq's MultiheadAttention.

    T target time   S source time   B batch   H heads   D channels a head   C = H · D channels

fairseq's encoder-attention leaves torch's kernels in training, and every layer makes its masks anew. Here masks are
objects that a stack makes once a batch; a mask of any other kind, incremental decoding and a wish for the attention
weights are the twin's.
"""

from __future__ import annotations

import math
from typing import Any, Callable

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor
from torch.nn import functional

from .dropout import dropout
from .twin import Fast


class Causal:
    """Position t sees positions up to t.

    Padding, if it follows the words, is hidden from them by that alone.

    Args:
        length: T.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._bias: Tensor | None = None

    def bias(self, heads: int, like: Tensor) -> Tensor:
        """0 or -inf, to add to the scores. Shape (1, T, T)."""
        if self._bias is None or self._bias.dtype != like.dtype:
            self._bias = like.new_full((1, self.length, self.length), -math.inf).triu(1)
        return self._bias

    def kernel_options(self) -> dict[str, Any]:
        """As scaled_dot_product_attention takes it."""
        return {"is_causal": True}

    def tensor(self, like: Tensor) -> Tensor:
        """As the twin takes it. Shape (T, T)."""
        return self.bias(1, like)[0]


class Padding:
    """No position sees padding.

    Args:
        hidden: where padding is. Shape (B, S), bool.
    """

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden
        self._bias: Tensor | None = None
        self._seen: Tensor | None = None

    def bias(self, heads: int, like: Tensor) -> Tensor:
        """0 or -inf, to add to the scores. Shape (B · H, 1, S)."""
        if self._bias is None or self._bias.dtype != like.dtype or len(self._bias) != heads * len(self.hidden):
            bias = torch.zeros_like(self.hidden, dtype=like.dtype).masked_fill_(self.hidden, -math.inf)
            self._bias = bias.repeat_interleave(heads, 0).unsqueeze(1)
        return self._bias

    def kernel_options(self) -> dict[str, Any]:
        """As scaled_dot_product_attention takes it: what is seen. Shape (B, 1, 1, S)."""
        if self._seen is None:
            self._seen = ~self.hidden[:, None, None]
        return {"attn_mask": self._seen}

    def tensor(self, like: Tensor) -> Tensor:
        """As the twin takes it. Shape (B, S)."""
        return self.hidden


def by_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Causal | Padding | None, p: float) -> Tensor:
    """softmax(q kᵀ / sqrt(D)) v. Shapes: q (B, H, T, D), k and v (B, H, S, D), output (T, B, H, D)."""
    options = {} if mask is None else mask.kernel_options()
    return functional.scaled_dot_product_attention(q, k, v, dropout_p=p, **options).permute(2, 0, 1, 3)


def by_products(q: Tensor, k: Tensor, v: Tensor, mask: Causal | Padding | None, p: float) -> Tensor:
    """The same from two matrix products, for CPUs: torch's kernel for them has no dropout, and does more instead."""
    batch, heads, length, width = q.shape
    q, k, v = (it.reshape(batch * heads, -1, width) for it in (q, k, v))
    if mask is None:
        scores = torch.baddbmm(q.new_empty(1), q, k.transpose(1, 2), beta=0, alpha=width**-0.5)
    else:
        scores = torch.baddbmm(mask.bias(heads, q), q, k.transpose(1, 2), alpha=width**-0.5)
    mixed = torch.bmm(dropout(scores.softmax(-1), p), v)
    return mixed.view(batch, heads, length, width).permute(2, 0, 1, 3)


def _as_tensor(mask: Any, like: Tensor) -> Tensor | None:
    return mask.tensor(like) if isinstance(mask, (Causal, Padding)) else mask


class FastAttention(Fast, MultiheadAttention):
    """fairseq's attention, its parameters and their names unchanged."""

    linear: Callable[[Tensor, Tensor, Tensor], Tensor] = staticmethod(functional.linear)
    """What projects; linear.py has another."""

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
        """As fairseq's; either mask may also be an object of this module. A `Causal` one hides the padding, too."""
        mask = key_padding_mask if attn_mask is None else attn_mask
        asked = need_weights or need_head_weights or before_softmax or incremental_state is not None
        if self.plain or asked or not (mask is None or isinstance(mask, (Causal, Padding))):
            return super().forward(
                query,
                key,
                value,
                None if isinstance(attn_mask, Causal) else _as_tensor(key_padding_mask, query),
                incremental_state,
                need_weights,
                static_kv,
                _as_tensor(attn_mask, query),
                before_softmax,
                need_head_weights,
            )
        dropping = self.training or self.dropout_module.apply_during_inference
        p = self.dropout_module.p if dropping else 0.0
        q, k, v = self._projected(query, key)
        mixed = (by_products if p and q.is_cpu and q.dtype == torch.float32 else by_kernel)(q, k, v, mask, p)
        return self.out_proj(mixed.reshape(*query.shape[:2], -1)), None

    def _projected(self, query: Tensor, key: Tensor | None) -> tuple[Tensor, ...]:
        """Queries, keys and values. Shapes (B, H, T, D), and S for T."""
        if self.self_attention:
            return self._packed(query, self.q_proj, self.k_proj, self.v_proj)
        assert key is not None
        return (*self._packed(query, self.q_proj), *self._packed(key, self.k_proj, self.v_proj))

    def _packed(self, x: Tensor, *projections: Any) -> tuple[Tensor, ...]:
        """Several linear layers of one input, shape (T, B, C), as one of their weights."""
        if len(projections) == 1:
            packed = self.linear(x, projections[0].weight, projections[0].bias)
        else:
            packed = self.linear(
                x, torch.cat([it.weight for it in projections]), torch.cat([it.bias for it in projections])
            )
        heads = packed.view(*x.shape[:2], len(projections), self.num_heads, self.head_dim)
        return heads.permute(2, 1, 3, 0, 4).unbind()
