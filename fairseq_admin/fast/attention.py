"""Attention with one packed projection and torch's scaled_dot_product_attention; twin: fairseq's MultiheadAttention.

    T target time   S source time   B batch   H heads   D channels a head   C = H · D channels

fairseq's encoder-attention leaves torch's kernels in training, and every layer makes its masks again. Here masks are
objects that a stack makes once a batch; a mask of any other kind, incremental decoding and a wish for the attention
weights are the twin's.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .dropout import keep
from .linear import packed_linear
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


def by_kernel(mask: Causal | Padding | None, p: float, *packed: Tensor) -> Tensor:
    """softmax(q kᵀ / sqrt(D)) v, with dropout behind the softmax.

    Args:
        mask: what is not seen.
        p: the chance to drop.
        packed: queries, keys and values, several to a tensor. Shape (T, B, number in this tensor, H, D).

    Returns:
        Shape (T, B, C).
    """
    q, k, v = (each for several in packed for each in several.permute(2, 1, 3, 0, 4).unbind())
    options = {} if mask is None else mask.kernel_options()
    return functional.scaled_dot_product_attention(q, k, v, dropout_p=p, **options).permute(2, 0, 1, 3).flatten(2)


def _product(a: Tensor, b: Tensor, alpha: float, out: Tensor | None = None) -> Tensor:
    """α a b. Shapes (N, I, J), (N, J, K) and (N, I, K)."""
    return torch.baddbmm(a.new_empty(1), a, b, beta=0, alpha=alpha, out=out)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mask: Causal | Padding | None, p: float, *packed: Tensor) -> Tensor:
        length, batch, _, heads, width = packed[0].shape
        ctx.alpha = width**-0.5
        rows = [several.permute(2, 1, 3, 0, 4).reshape(several.size(2), batch * heads, -1, width) for several in packed]
        q, k, v = (each for several in rows for each in several)
        k = k.transpose(1, 2)
        scores = (
            _product(q, k, ctx.alpha) if mask is None else torch.baddbmm(mask.bias(heads, q), q, k, alpha=ctx.alpha)
        )
        shares = scores.softmax(-1)
        kept, ctx.scale = keep(shares, p)
        ctx.save_for_backward(shares, kept, *rows)
        mixed = _product(shares * kept, v, ctx.scale)
        return mixed.view(batch, heads, length, width).permute(2, 0, 1, 3).flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        shares, kept, *rows = ctx.saved_tensors
        q, k, v = (each for several in rows for each in several)
        gradients = [torch.empty_like(several) for several in rows]
        of_q, of_k, of_v = (each for several in gradients for each in several)
        (length, batch, channels), width = gradient.shape, q.size(2)
        heads = channels // width
        g = gradient.view(length, batch, heads, width).permute(1, 2, 0, 3).reshape(q.shape)
        _product((shares * kept).transpose(1, 2), g, ctx.scale, of_v)
        of_shares = _product(g, v.transpose(1, 2), ctx.scale).mul_(kept)
        of_scores = torch._softmax_backward_data(of_shares, shares, -1, shares.dtype)
        _product(of_scores, k, ctx.alpha, of_q)
        _product(of_scores.transpose(1, 2), q, ctx.alpha, of_k)
        back = (it.view(len(it), batch, heads, -1, width).permute(3, 1, 0, 2, 4).contiguous() for it in gradients)
        return None, None, *back


def by_products(mask: Causal | Padding | None, p: float, *packed: Tensor) -> Tensor:
    """As `by_kernel` with 0 < p < 1, on CPUs: torch's kernel for them has no dropout, and does far more instead."""
    return _Products.apply(mask, p, *packed)


def _as_tensor(mask: Any, like: Tensor) -> Tensor | None:
    return mask.tensor(like) if isinstance(mask, (Causal, Padding)) else mask


class FastAttention(Fast, MultiheadAttention):
    """fairseq's attention, its parameters and their names unchanged."""

    onednn: bool = False
    """Whether projections go through oneDNN."""

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
        if self.self_attention:
            packed = [self._packed(query, self.q_proj, self.k_proj, self.v_proj)]
        else:
            assert key is not None
            packed = [self._packed(query, self.q_proj), self._packed(key, self.k_proj, self.v_proj)]
        products = 0 < p < 1 and query.is_cpu and packed[0].dtype in (torch.float32, torch.float64)
        return self.out_proj((by_products if products else by_kernel)(mask, p, *packed)), None

    def _packed(self, x: Tensor, *projections: Any) -> Tensor:
        """Several linear layers of one input as one. Shapes (T, B, C) and (T, B, number of layers, H, D)."""
        packed = packed_linear(self.onednn, x, *(it.weight for it in projections), *(it.bias for it in projections))
        return packed.view(*x.shape[:2], len(projections), self.num_heads, self.head_dim)
