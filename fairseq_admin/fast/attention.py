"""Attention with packed projections; the plain one is fairseq's MultiheadAttention.

    y = (D(S) v) W_oᵀ + b_o,   S = softmax(q kᵀ / sqrt(D) + bias),   q = x W_qᵀ + b_q,   k and v likewise

    T target time   S source time   B batch   H heads   D channels a head   C = H · D channels   D( ) dropout

fairseq's attention is slower in training for three reasons. Its encoder-attention does not use torch's attention
kernels; every layer makes its masks again; and the kernels copy its tensors, because they are time-first. Here a stack
makes each mask once per batch, as a 4-D bias. With such a bias, the other tensors are rows: matrices of
B · T rows and C columns, which a linear layer takes as they are.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn
from torch.nn import functional

from .dropout import dropout
from .plain import Fast

ALIGNED = 8
"""CUDA's kernels copy a bias unless its rows are a multiple of this many numbers apart."""
ROW = 16
"""Numbers in a vector of AVX-512. On CPUs torch's softmax takes seven times as long if a row is shorter."""


def _additive_mask(hidden: Tensor, like: Tensor, cpu: bool) -> Tensor:
    """Additive mask: -inf where hidden, else 0. Shape (..., S).

    On CPUs the result may be longer than S. It hides all positions after S.
    """
    kind = like.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else like.dtype
    length = hidden.size(-1)
    width = max(length, ROW) if cpu else (length // ALIGNED + 1) * ALIGNED
    bias = like.new_full((*hidden.shape[:-1], width), -math.inf, dtype=dtype)
    bias[..., :length].masked_fill_(~hidden, 0)
    return bias if cpu else bias[..., :length]


def padding_bias(hidden: Tensor, like: Tensor, cpu: bool) -> Tensor:
    """Mask that hides padding from every position.

    Args:
        hidden: True at padding. Shape (B, S).
        like: a tensor of the type and device of the queries.
        cpu: whether the mask is for the code that runs on CPUs.

    Returns:
        Shape (B, 1, 1, S or more).
    """
    return _additive_mask(hidden[:, None, None], like, cpu)


def causal_bias(length: int, like: Tensor, cpu: bool) -> Tensor:
    """Mask that shows position t the positions up to t, and so hides padding at the end. Shape (1, 1, T, T or more).

    CUDA's kernels have this mask built in. For them only the shape of the result counts: (1, 1, T, 1).
    """
    if not cpu:
        return like.new_empty(1, 1, length, 1)
    return _additive_mask(torch.ones(length, length, dtype=torch.bool).triu(1)[None, None], like, cpu)


def by_products(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, p: float) -> Tensor:
    """Attention for CPUs, where torch's kernel has no dropout and its fallback is slow. Shapes (B, H, T or S, D)."""
    batch, heads, length, width = q.shape
    missing = bias.size(-1) - k.size(2)
    if missing:
        k, v = (functional.pad(each, (0, 0, 0, missing)) for each in (k, v))
    q, k, v = (each.reshape(batch * heads, -1, width) for each in (q, k, v))
    bias = bias.expand(-1, heads, -1, -1).flatten(0, 1) if len(bias) > 1 else bias[0]
    shares = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=width**-0.5).softmax(-1)
    return torch.bmm(dropout(shares, p), v).view(batch, heads, length, width)


def heads_of(x: Tensor, linears: list[nn.Linear], batch: int, heads: int, cpu: bool) -> tuple[Tensor, ...]:
    """Heads from several linear layers of one input. Shapes (B · T, C) and, for each layer, (B, H, T, D).

    One product computes all of them, except on CPUs, where the copy of the weights costs more than it saves.
    """
    length = len(x) // batch
    if cpu or len(linears) == 1:
        parts = tuple(linear(x).view(batch, length, heads, -1) for linear in linears)
    else:
        weight, bias = torch.cat([linear.weight for linear in linears]), torch.cat([linear.bias for linear in linears])
        parts = functional.linear(x, weight, bias).view(batch, length, len(linears), heads, -1).unbind(2)
    return tuple(part.transpose(1, 2) for part in parts)


class FastAttention(Fast, MultiheadAttention):
    """fairseq's attention, with the same parameters and names."""

    def forward(
        self,
        query: Tensor,
        key: Any,
        value: Any,
        key_padding_mask: Any = None,
        *,
        attn_mask: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as fairseq does. If the mask is 4-D, the tensors are rows, and no attention weights are returned.

        Then `key` may be the pair of the encoder's keys and values, each of shape (B, H, S, D).
        """
        bias = key_padding_mask if attn_mask is None else attn_mask
        if bias is None or bias.dim() < 4:
            return super().forward(query, key, value, key_padding_mask, attn_mask=attn_mask, **options)
        batch = len(bias) if attn_mask is None else len(query) // bias.size(2)
        sizes = batch, self.num_heads, self.on_cpu(query)
        if self.self_attention:
            q, k, v = heads_of(query, [self.q_proj, self.k_proj, self.v_proj], *sizes)
        else:
            (q,) = heads_of(query, [self.q_proj], *sizes)
            k, v = key if isinstance(key, tuple) else heads_of(key, [self.k_proj, self.v_proj], *sizes)
        p = self.dropout_module.p
        if self.on_cpu(query):
            mixed = by_products(q, k, v, bias, p)
        elif attn_mask is None:
            mixed = functional.scaled_dot_product_attention(q, k, v, bias, p)
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, None, p, is_causal=True)
        return self.out_proj(mixed.transpose(1, 2).reshape(len(query), -1)), None
