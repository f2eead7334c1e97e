"""What a call does with a scale of channels in its input: it is tried, not looked up.

The call is made again with random numbers in the places of all floats, then with the channels scaled by powers of two,
of both signs, which no rounding sees:

    the same bits                               it reads no numbers, but a shape or a type
    bits scaled along an axis                   the scale passes (dropout, transpose, a mask)
    the same bits, with a parameter divided     its entries along an axis read the channels; the fold divides them
    anything else                               the scale cannot be undone there
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from .folding import divide_input


@dataclass(frozen=True)
class Reader:
    """A parameter whose entries along `axis` multiply the channels: those in the rows from `start` to `end`."""

    parameter: str
    axis: int
    start: int
    end: int

    def divided(self, weight: Tensor, omega: Tensor) -> Tensor:
        """The parameter for channels that are ω times as large, float64."""
        whole = weight.double().clone()
        whole[self.start : self.end] = divide_input(whole[self.start : self.end], omega, self.axis)
        return whole


def candidates(name: str, shape: torch.Size, channels: int) -> Iterator[Reader]:
    """The ways in which a parameter may read channels; one matrix of q, k and v may in some of its thirds."""
    for axis in reversed(range(len(shape))):
        if shape[axis] == channels:
            yield Reader(name, axis, 0, shape[0])
    if shape == (3 * channels, channels):
        for start, end in combinations(range(0, 4 * channels, channels), 2):
            yield Reader(name, 1, start, end)


def tensors(values: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def run(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, list[Tensor]]:
    """What a function returns, and the tensors that it changed in place."""
    versions = [(tensor, tensor._version) for tensor in tensors([args, kwargs])]
    return function(*args, **kwargs), [tensor for tensor, version in versions if tensor._version != version]


def effect(
    call: tuple[Callable[..., Any], Any, Any], axes: dict[int, int], names: dict[int, str], channels: int
) -> list[int | None] | Reader | None:
    """What a call does with a scale of channels.

    Args:
        call: the function and its arguments, positional and named.
        axes: where the channels are in those of its tensors that have them, by id, counted from the end.
        names: of those of its tensors that are parameters, by id.
        channels: C.

    Returns:
        Where the channels are in each tensor that it makes (None: it stays the same), if the scale passes; or the
        parameter that reads them; or None.
    """
    function, *arguments = call
    drawn = {id(t): torch.randn_like(t) if t.is_floating_point() else t for t in tensors(arguments)}
    scale = 2.0 ** torch.randint(1, 4, (channels,)) * (2 * torch.randint(2, (channels,)) - 1)

    def outputs(changed: dict[int, Tensor]) -> list[Tensor]:
        numbers = {**drawn, **changed}
        result, written = run(function, *tree_map_only(Tensor, lambda t: numbers[id(t)].clone(), arguments))
        return written or tensors(result)

    def scaled(tensor: Tensor, axis: int) -> Tensor:
        return tensor * scale.to(tensor).reshape(-1, *[1] * (-axis - 1))

    def passed(old: Tensor, new: Tensor) -> list[int | None]:
        ways = [axis for axis in range(-old.dim(), 0) if old.is_floating_point() and old.size(axis) == channels]
        same: list[int | None] = [None] if torch.equal(old, new) else []
        return same + [axis for axis in ways if torch.equal(scaled(old, axis), new)]

    inputs = {key: scaled(drawn[key], axis) for key, axis in axes.items()}
    before = outputs({})
    ways = list(map(passed, before, outputs(inputs)))
    if all(ways):
        return [way[0] for way in ways]
    for key, name in names.items():
        for reader in candidates(name, drawn[key].shape, channels):
            divided = reader.divided(drawn[key], scale.to(drawn[key])).to(drawn[key])
            if all(map(torch.equal, before, outputs({**inputs, key: divided}))):
                return reader
    return None
