"""A feed-forward layer's activation and dropout as one piece, with its linear layers or alone; twins: fairseq's calls.

    y = D(relu(x W_1ᵀ + b_1)) W_2ᵀ + b_2      with D( ) dropout; or gelu

relu keeps for its backward what the second linear layer keeps anyway, its output: > 0 where its input was and was not
dropped. gelu keeps its input and a byte an element for the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from fairseq.modules import gelu, gelu_accurate
from torch import Tensor, nn
from torch.nn import functional

from .again import kept, taken
from .dropout import FastDropout, dropout, keep, scaled
from .linear import FastLinear, product, product_backward
from .pieces import Branch, Ends, Piece, Tensors, able, unobserved
from .shortcut import Shared


class _Relu(Piece):
    def __init__(self, p: float) -> None:
        self.p, self.scale = p, 1 / (1 - p)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensors]:
        y = functional.relu(x)
        if self.p and y.is_cpu:
            mask, self.scale = keep(y, self.p)
            scaled(y, mask, self.scale, out=y)
        elif self.p:
            y, _ = torch.native_dropout(y, self.p, True)  # in place it is four kernels, and rounds 1 / (1 - p)
        return y, (y,)

    def backward(self, gradient: Tensor, saved: Tensors, needed: Sequence[bool]) -> Tensors:
        of_x = torch.ops.aten.threshold_backward(gradient, saved[0], 0)
        return (of_x.mul_(self.scale) if self.p else of_x,)


class _Gelu(Piece):
    def __init__(self, p: float, approximate: str) -> None:
        self.p, self.scale, self.approximate = p, 1 / (1 - p), approximate

    def forward(self, x: Tensor) -> tuple[Tensor, Tensors]:
        y, mask = functional.gelu(x, approximate=self.approximate), None
        if self.p and x.is_cpu:
            mask, self.scale = keep(x, self.p)
            scaled(y, mask, self.scale, out=y)
        elif self.p:
            y, mask = torch.native_dropout(y, self.p, True)
        return y, (x, mask)

    def backward(self, gradient: Tensor, saved: Tensors, needed: Sequence[bool]) -> Tensors:
        x, mask = saved
        gradient = gradient if mask is None else scaled(gradient, mask, self.scale)
        return (torch.ops.aten.gelu_backward(gradient, x, approximate=self.approximate),)


FUSED: dict[Callable, Callable[[float], Piece]] = {
    functional.relu: _Relu,
    gelu: partial(_Gelu, approximate="none"),
    gelu_accurate: partial(_Gelu, approximate="tanh"),
}
"""From the activations of fairseq that have a piece with dropout to that piece, for a chance to drop below 1."""


class _FeedForward(Piece):
    """Given are the input, the first weight and bias, and the second."""

    def __init__(self, activation: Piece, onednn: bool) -> None:
        self.activation, self.onednn = activation, onednn

    def forward(self, *given: Any) -> tuple[Tensor, Tensors]:
        x, first, first_bias, second, second_bias = given
        y, of_activation = self.activation.forward(product(self.onednn, x, first, first_bias))
        self.maker, of_x = kept(x)
        self.number = len(of_x)
        return product(self.onednn, y, second, second_bias), (first, second, y, *of_x, *of_activation)

    def backward(self, gradient: Tensor, saved: Tensors, needed: Sequence[bool]) -> Tensors:
        first, second, y, *rest = saved
        x, of_activation = taken(self.maker, tuple(rest[: self.number])), rest[self.number :]
        of_y, *of_second = product_backward(self.onednn, gradient, y, second, (True, *needed[3:]))
        assert of_y is not None
        (inner,) = self.activation.backward(of_y, of_activation, (True,))
        return [*product_backward(self.onednn, inner, x, first, needed[:3]), *of_second]


def passed_on(x: Tensor) -> Tensor:
    """What stands for a layer's activation, which its dropout module then computes."""
    return x


class ActivationDropout(FastDropout):
    """A layer's activation, then its dropout."""

    activation: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor, inplace: bool = False) -> Tensor:
        """Any shape."""
        if isinstance(x, Branch):
            return x  # type: ignore[unreachable]
        if self.plain:
            return super().forward(self.activation(x), inplace)
        p = self.left()
        return Branch(FUSED[self.activation](p), [x]).computed() if p < 1 else dropout(self.activation(x), p)

    def left(self) -> float:
        """The chance to drop."""
        return self.p if self.training or self.apply_during_inference else 0.0


class FirstLinear(FastLinear):
    """The first linear layer, which gives the whole as a `Branch` where it can.

    Attributes:
        others: the activation's dropout, and the second linear layer.
        shared: the stack's.
    """

    others: tuple[ActivationDropout, LastLinear]
    shared: Shared

    def forward(self, x: Tensor) -> Tensor:
        """Shapes (..., d) and (..., f)."""
        between, last = self.others
        p = between.left()
        if not (self.shared.running and p < 1 and able(x) and unobserved(self, between, last)):
            return super().forward(x)
        onednn = self.onednn and x.dtype == torch.float32
        piece = _FeedForward(FUSED[between.activation](p), onednn)
        return Branch(piece, [x, self.weight, self.bias, last.weight, last.bias])  # type: ignore[return-value]


class LastLinear(Ends, FastLinear):
    """The second linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Shapes (..., f) and (..., d)."""
        return self.given_on(x) if isinstance(x, Branch) else super().forward(x)


def fuse(layer: Any, shared: Shared) -> bool:
    """Let one piece compute a layer's activation and dropout. Returns whether there is one for its activation."""
    if layer.activation_fn not in FUSED:
        return False
    module = layer.activation_dropout_module
    module.__class__ = ActivationDropout
    module.activation, layer.activation_fn = layer.activation_fn, passed_on
    if type(layer.fc1) is type(layer.fc2) is nn.Linear and getattr(layer, "ffn_layernorm", None) is None:
        layer.fc1.__class__, layer.fc2.__class__ = FirstLinear, LastLinear
        layer.fc1.others, layer.fc1.shared = (module, layer.fc2), shared  # type: ignore[assignment]
    return True
