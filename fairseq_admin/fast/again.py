"""A norm's output, made again in the backward instead of kept.

    y = LN(z)

The norm keeps z. Whoever takes y, the next product and the next shortcut, would keep y for its own backward; instead it
keeps z too, and the first of them to be asked makes y again for all.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

WORTH = 2**17
"""The numbers of the smallest output that is made again: below it, time counts more than memory."""


class Maker:
    """Makes y again, with the same bits.

    Args:
        eps: the norm's.
    """

    def __init__(self, eps: float) -> None:
        self.eps, self.takers = eps, 0
        self._made: Tensor | None = None

    def __call__(self, z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """y, held from the first of its takers' backwards to the last."""
        y = self._made
        if y is None:
            y = torch.native_layer_norm(z, weight.shape, weight, bias, self.eps)[0]
        self.takers -= 1
        self._made = y if self.takers > 0 else None
        return y


def stays(weight: Tensor | None) -> bool:
    """Whether a weight is there from a batch's forward to the end of its backward.

    Under --ddp-backend fully_sharded a layer's is freed while other layers run: a view of one tensor, or it is marked.
    """
    return isinstance(weight, nn.Parameter) and not getattr(weight, "_is_sharded", False)


def remember(y: Tensor, z: Tensor, weight: Tensor, bias: Tensor, eps: float) -> None:
    """Note on y what it was made of, if that is worth while and will be there."""
    if y.requires_grad and y.numel() >= WORTH and stays(weight):
        y.made_of = Maker(eps), (z, weight, bias), y._version  # type: ignore[attr-defined]


def made_of(x: Tensor) -> bool:
    """Whether `kept` would not keep x itself."""
    return getattr(x, "made_of", None) is not None


def matrix(x: Tensor) -> Tensor:
    """x as a matrix of rows, with the note on it."""
    rows = x.flatten(0, -2)
    rows.made_of = getattr(x, "made_of", None)  # type: ignore[attr-defined]
    return rows


def kept(x: Tensor) -> tuple[Maker | None, tuple[Tensor, ...]]:
    """What to keep of x for a backward; `taken` takes it from there."""
    note = getattr(x, "made_of", None)
    if note is None or note[2] != x._version:  # changed in place since
        return None, (x,)
    maker, tensors, _ = note
    maker.takers += 1
    return maker, tensors


def taken(maker: Maker | None, tensors: tuple[Tensor, ...]) -> Tensor:
    """x, of which `kept` gave this. Once in a backward."""
    return tensors[0] if maker is None else maker(*tensors)
