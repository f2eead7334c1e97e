"""Where a scale of channels goes in one call: found by trial, not from a list of functions.

The call is repeated with random numbers in place of all floats, then with the channels scaled by powers of two of both
signs, which rounding does not change. The results are compared bit by bit:

    equal                               the call reads no numbers, only a shape or a type
    scaled along an axis                the scale passes through (dropout, transpose, a mask)
    equal once a parameter is divided   its entries along an axis read the channels; the fold divides them
    anything else                       the call cannot undo the scale

`written_scale` finds by the same trial how a norm's parameters scale its output.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, combinations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from .folding import scale

NORM, PARAMETER, ARGUMENT = "norm", "parameter", "argument"
HELD, UNSEEN = "held by a module", "unseen"
"""Origins of a value that no torch function made. UNSEEN: numpy or a custom autograd function made it."""
clock = itertools.count()
"""Numbers values and handovers in the order in which they happen."""


class Scaling(NamedTuple):
    """Which numbers of a parameter scale with the channels: the entries along an axis, in some of its rows."""

    axis: int = 0
    rows: slice = slice(None)
    offset: float = 0.0
    """Added before scaling, subtracted afterwards: 1 for a norm whose weight starts at 0."""

    def scaled(self, parameter: Tensor, factor: Tensor) -> Tensor:
        """The parameter with these numbers `factor` times as large, float64."""
        whole = parameter.double().clone()
        whole[self.rows] = scale(whole[self.rows] + self.offset, factor, self.axis) - self.offset
        return whole


@dataclass(eq=False)
class Call:
    """One call of a module."""

    module: str
    """The module's name in the model. For a value that no call made: the name of the parameter or argument."""
    around: list[Call] = field(default_factory=list)
    """The enclosing calls, innermost first."""


class Handover(NamedTuple):
    """A module that was given a tensor, or returned it."""

    call: Call
    argument: int | str | None
    """Position or keyword. None: the module returned the tensor."""
    time: int


@dataclass(eq=False)
class Value:
    """The numbers of a tensor at one moment of a forward. A call is represented by the first value that it makes."""

    made_by: str
    """The name of the torch function that made it, or NORM, PARAMETER, ARGUMENT, HELD or UNSEEN."""
    call: Call
    """The module call in which the function ran. For NORM: the call of the norm."""
    size: int = 0
    """The number of its elements."""
    reads: list[Value] = field(default_factory=list)
    line: str = ""
    """The line of the model's code that made it."""
    time: int = field(default_factory=clock.__next__)
    readers: int = 0
    """The number of calls that read it."""
    handovers: list[Handover] = field(default_factory=list)
    channels: dict[Value, int] = field(default_factory=dict)
    """The norms whose channels it has, each with the axis, from the end. Scaling them scales this value."""
    written: dict[str, Scaling] = field(default_factory=dict)
    """For NORM: how the norm's parameters scale its channels, by name."""
    readings: list[tuple[Scaling | None, Value]] = field(default_factory=list)
    """For NORM: how its channels are read, and by which parameter; or None, and a call that cannot undo a scale."""

    def ancestors(self) -> set[Value]:
        """This value and all values from which it was computed."""
        known, new = set(), [self]
        while new:
            value = new.pop()
            if value not in known:
                known.add(value)
                new += value.reads
        return known


def tensors(values: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def random_like(tensor: Tensor) -> Tensor:
    """Odd multiples of 1/16 in (-1, 1): few bits, so products and quotients are exact in half precision."""
    return (2 * torch.randint_like(tensor, -8, 8) + 1) / 16


def run(function: Any, args: Any, kwargs: Any) -> tuple[Any, list[Tensor]]:
    """Call a function. Returns its result and the tensors that it made or changed.

    If the function returns one of its arguments, the result is a view of it.
    """
    versions = [(tensor, tensor._version) for tensor in tensors([args, kwargs])]
    result = function(*args, **kwargs)
    changed = [tensor for tensor, version in versions if tensor._version != version]
    if not changed and any(result is tensor for tensor, _ in versions):
        result = result.view_as(result)
    return result, changed or tensors(result)


def random_scale(channels: int) -> Tensor:
    """Random powers of two of both signs. Rounding does not change products with them. Shape (C,)."""
    return 2.0 ** torch.randint(1, 4, (channels,)) * (2 * torch.randint(2, (channels,)) - 1)


def scaled_axis(before: Tensor, after: Tensor, factor: Tensor) -> int | None:
    """The axis, from the end, along which `after` is `before` times a factor. 0: they are equal. None: neither.

    Args:
        factor: shape (C,).
    """
    if torch.equal(before, after):
        return 0
    if before.shape != after.shape or not before.is_floating_point():
        return None
    axes = [axis for axis in range(-before.dim(), 0) if before.size(axis) == len(factor)]
    expected = {axis: scale(before, factor, axis).to(before.dtype) for axis in axes}
    unseen = 16 * torch.finfo(before.dtype).tiny  # smaller numbers have fewer bits
    return next((axis for axis in axes if torch.allclose(after, expected[axis], rtol=0, atol=unseen)), None)


def candidates(shape: torch.Size, channels: int) -> Iterator[Scaling]:
    """The ways in which a parameter may read channels. In a joint matrix of q, k and v some thirds may read them."""
    for axis in reversed(range(len(shape))):
        if shape[axis] == channels:
            yield Scaling(axis)
    if shape == (3 * channels, channels):
        for start, end in combinations(range(0, 4 * channels, channels), 2):
            yield Scaling(1, slice(start, end))


def propagate_scale(norm: Value, call: tuple[Any, Any, Any], inputs: dict[int, Value], made: list[Value]) -> None:
    """Record where a norm's channels are in the result of a call, or how the call reads them.

    Args:
        norm: the norm.
        call: the function, its positional and its keyword arguments.
        inputs: the values of the call's tensors, by the tensor's id.
        made: the values that the call made.
    """
    function, *arguments = call
    drawn = {id(t): random_like(t) if t.is_floating_point() else t for t in tensors(arguments)}
    axes = {key: value.channels[norm] for key, value in inputs.items() if norm in value.channels}
    factor = random_scale({drawn[key].size(axis) for key, axis in axes.items()}.pop())
    channels = [(key, Scaling(axis), factor) for key, axis in axes.items()]

    def outputs(*changes: tuple[int, Scaling, Tensor]) -> list[Tensor]:
        numbers = drawn | {key: scaling.scaled(drawn[key], by).to(drawn[key].dtype) for key, scaling, by in changes}
        return run(function, *tree_map_only(Tensor, lambda t: numbers[id(t)].clone(), arguments))[1]

    before = outputs()
    passed = [scaled_axis(old, new, factor) for old, new in zip(before, outputs(*channels))]
    if None not in passed and all(t.numel() for t in before):  # an expert without a token shows nothing
        for value, axis in zip(made, passed):
            value.channels.update({norm: axis} if axis else {})
        return
    parameters = [key for key, value in inputs.items() if value.made_by == PARAMETER]
    ways = [(key, way, 1 / factor) for key in parameters for way in candidates(drawn[key].shape, len(factor))]
    # One call may read the channels by three matrices: of queries, keys and values.
    for readers in chain.from_iterable(combinations(ways, number) for number in (1, 2, 3)):
        if all(map(torch.equal, before, outputs(*channels, *readers))):
            return norm.readings.extend((way, inputs[key]) for key, way, _ in readers)
    norm.readings.append((None, made[0]))


def written_scale(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[dict[str, Scaling], int]:
    """How a module's parameters scale its output, if the module is a norm: one number for each channel.

    Returns:
        The scaling of each parameter, by name, and the axis of the output that it scales, from the end. ({}, 0): the
        module is no norm.
    """
    parameters, every = dict(module.named_parameters(recurse=False)), list(module.parameters())
    shapes = {parameter.shape for parameter in every}
    if len(parameters) < len(every) or len(shapes) != 1 or len(shape := shapes.pop()) != 1 or shape == (1,):
        return {}, 0
    drawn, x, factor = (
        {name: random_like(p) for name, p in parameters.items()},
        random_like(args[0]),
        random_scale(*shape),
    )

    def output(parameters: dict[str, Tensor]) -> Any:
        return torch.func.functional_call(module, parameters, (x, *args[1:]), kwargs)

    before = output(drawn)
    if not isinstance(before, Tensor) or before.shape != x.shape:
        return {}, 0
    for offsets in product((0.0, 1.0), repeat=len(drawn)):
        written = {name: Scaling(offset=offset) for name, offset in zip(drawn, offsets)}
        after = output({name: written[name].scaled(p, factor).to(p.dtype) for name, p in drawn.items()})
        if axis := scaled_axis(before, after, factor):
            return written, axis
    return {}, 0
