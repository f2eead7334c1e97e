"""Attention on CPUs by batched products, with its projections; twin: fairseq's MultiheadAttention.

    y = (D(S) v) W_oᵀ + b_o,   S = softmax(q kᵀ / sqrt(D)),   q = x W_qᵀ + b_q,   k and v likewise

with D( ) dropout. torch's kernel for CPUs has no dropout, and does far more instead; where nothing is dropped, it is
ahead for long sentences only. Kept for the backward are q, k, v, S and a byte a score for dropout's mask; x, unless it
can be made again (again.py); and D(S) v, if it is small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import again
from .again import kept, taken
from .dropout import keep
from .linear import packed_backward, packed_product, product, product_backward
from .pieces import Branch, Piece, Tensors, cut

SHORT = 32
"""The most keys for which products are ahead of the kernel where nothing is dropped."""

VECTORS = {"AVX512": 64, "AVX2": 32}
"""Bytes of a vector, by torch's name of the CPU's best. Its softmax takes seven times as long for a shorter row."""


def filled_up(scores: Tensor, value: float) -> Tensor:
    """Rows as long as a vector, with this value behind the scores. Shapes (N, T, S) and (N, T, S or more)."""
    vector = VECTORS.get(torch.backends.cpu.get_cpu_capability(), 0) // scores.element_size()
    missing = vector - scores.size(-1)
    return functional.pad(scores, (0, missing), value=value) if missing > 0 else scores


def _product(a: Tensor, b: Tensor, alpha: float, out: Tensor | None = None) -> Tensor:
    """α a b. Shapes (N, I, J), (N, J, K) and (N, I, K)."""
    return torch.baddbmm(a.new_empty(1), a, b, beta=0, alpha=alpha, out=out)


def _rows(packed: Tensor, heads: int, width: int) -> Tensor:
    """From (B, T, n · C) to (n, B · H, T, D), the shape of batched products."""
    batch, length, _ = packed.shape
    rows = packed.view(batch, length, -1, heads, width).permute(2, 0, 3, 1, 4)
    return rows.reshape(-1, batch * heads, length, width)


def _columns(rows: Tensor, heads: int) -> Tensor:
    """From (n, B · H, T, D) to (B, T, n · C)."""
    number, _, length, width = rows.shape
    return rows.view(number, -1, heads, length, width).permute(1, 3, 0, 2, 4).flatten(2)


def _left(shares: Tensor, drawn: Tensor | None, keys: int) -> Tensor:
    """What dropout leaves of the shares of so many keys, but for its scale."""
    shares = shares[..., :keys]
    return shares if drawn is None else shares * drawn


class _Attention(Piece):
    """Given are, for each side, an input with weights, then biases; and the output's weight and bias.

    The sides are the one that asks and the one that is asked, or both in one.
    """

    def __init__(self, mask: Any, p: float, onednn: bool, heads: int, sizes: Sequence[int]) -> None:
        self.mask, self.p, self.onednn, self.heads, self.sizes = mask, p, onednn, heads, sizes

    def forward(self, *given: Any) -> tuple[Tensor, Tensors]:
        *sides, (weight, bias) = cut(given, self.sizes)
        width = weight.size(1) // self.heads
        self.alpha = width**-0.5
        rows = [_rows(packed_product(self.onednn, x, parts), self.heads, width) for x, *parts in sides]
        q, k, v = (each for several in rows for each in several)
        k, hidden = k.transpose(1, 2), self.mask.bias(self.heads, q)
        scores = _product(q, k, self.alpha) if hidden is None else torch.baddbmm(hidden, q, k, alpha=self.alpha)
        shares, drawn, self.scale = filled_up(scores, -math.inf).softmax(-1), None, 1.0
        if self.p:
            drawn, self.scale = keep(scores, self.p)
        mixed = self._mixed(shares, drawn, v)
        self.makers, inputs = zip(*(kept(x) for x, *_ in sides))
        weights = [parts[: len(parts) // 2] for _, *parts in sides]
        self.saved = [len(it) for it in (rows, *weights, *inputs)]
        small = mixed if mixed.numel() < again.WORTH else None
        flat = (it for several in (rows, *weights, *inputs) for it in several)
        return product(self.onednn, mixed, weight, bias), (weight, shares, drawn, small, *flat)

    def _mixed(self, shares: Tensor, drawn: Tensor | None, v: Tensor) -> Tensor:
        """Values, mixed by the shares that dropout has left. Shape (B, T, C)."""
        return _columns(_product(_left(shares, drawn, v.size(1)), v, self.scale).unsqueeze(0), self.heads)

    def backward(self, gradient: Tensor, saved: Tensors, needed: Sequence[bool]) -> Tensors:
        *needed_sides, needed_last = cut(needed, self.sizes)
        weight, shares, drawn, mixed, *rest = saved
        rows, *rest, _ = cut(rest, self.saved)
        weights, inputs = rest[: len(rows)], rest[len(rows) :]
        q, k, v = (each for several in rows for each in several)
        gradients = [torch.empty_like(several) for several in rows]
        of_q, of_k, of_v = (each for several in gradients for each in several)
        mixed = self._mixed(shares, drawn, v) if mixed is None else mixed
        of_mixed, *of_last = product_backward(self.onednn, gradient, mixed, weight, (True, *needed_last))
        del mixed
        assert of_mixed is not None
        g = _rows(of_mixed, self.heads, q.size(-1))[0]
        _product(_left(shares, drawn, v.size(1)).transpose(1, 2), g, self.scale, of_v)
        of_shares = _product(g, v.transpose(1, 2), self.scale)
        of_shares = filled_up(of_shares if drawn is None else of_shares.mul_(drawn), 0)
        of_scores = torch._softmax_backward_data(of_shares, shares, -1, shares.dtype)[..., : v.size(1)]
        _product(of_scores, k, self.alpha, of_q)
        _product(of_scores.transpose(1, 2), q, self.alpha, of_k)
        found: list[Tensor | None] = []
        for it, maker, x, own, asked in zip(gradients, self.makers, inputs, weights, needed_sides):
            of_packed = _columns(it, self.heads)
            found += packed_backward(self.onednn, of_packed, taken(maker, tuple(x)), own, asked)
        return [*found, *of_last]


def by_products(
    mask: Any, p: float, onednn: bool, heads: int, sides: Sequence[tuple[Tensor, Sequence[nn.Linear]]], last: nn.Linear
) -> Branch:
    """Attention and the projection of its output. Shape (B, T, C).

    Args:
        mask: what is not seen.
        p: the chance to drop. 0 <= p < 1.
        onednn: whether projections go through oneDNN, if they can.
        sides: inputs with their projections: one with those of q, k and v, or one with q's and one with k's and v's.
        last: the output's projection.
    """
    given = [[x, *(it.weight for it in of), *(it.bias for it in of)] for x, of in sides]
    onednn = onednn and last.weight.dtype == torch.float32
    piece = _Attention(mask, p, onednn, heads, [len(each) for each in given])
    return Branch(piece, [*(it for each in given for it in each), last.weight, last.bias])
