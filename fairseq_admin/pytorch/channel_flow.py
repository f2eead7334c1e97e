"""How one call passes on a scale of its channels. This is found by trial, not from a list of functions.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, partial
from itertools import chain, combinations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..core.folding import scale

NORM, PARAMETER, ARGUMENT = "norm", "parameter", "argument"
HELD, UNSEEN = "held by a module", "unseen"
"""Origins of a value that no torch function made. UNSEEN: numpy or a custom autograd function made it."""
clock = itertools.count()
"""Numbers values in the order in which they are made."""
drawing = cache(torch.Generator)
"""The random generator of trials on a device, apart from the generator that the model draws from."""


class Scaling(NamedTuple):
    """The entries of a parameter that scale with the channels. In `rows`, entry c along `axis` belongs to channel c."""

    axis: int = 0
    rows: slice = slice(None)
    offset: float = 0.0
    """Added before scaling, subtracted afterwards: 1 for a norm whose weight starts at 0."""

    def scaled(self, parameter: Tensor, factor: Tensor) -> Tensor:
        """A float64 copy of the parameter with these entries scaled by `factor`."""
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
    argument: str
    """The name of the argument. "": the module returned the tensor."""


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
    order: tuple[int, ...] = ()
    """For a call that puts the axes of its argument into another order: the axes in that order."""
    time: int = field(default_factory=clock.__next__)
    readers: int = 0
    """The number of calls that read it."""
    handovers: list[Handover] = field(default_factory=list)
    channels: dict[Value, int] = field(default_factory=dict)
    """The norms whose channels it has, each with the axis, from the end. Scaling them scales this value."""
    written: list[tuple[Scaling, Value]] = field(default_factory=list)
    """For NORM: how its channels are scaled, and by which parameter."""
    readings: list[tuple[Scaling | None, Value]] = field(default_factory=list)
    """For NORM: how its channels are read, and by which parameter; or None, and a call that cannot undo a scale."""

    def ancestors(self) -> set[Value]:
        """This value and all values from which it was computed."""
        known, new = set(), {self}
        while new:
            known |= new
            new = {read for value in new for read in value.reads} - known
        return known


def tensors(values: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples, dictionaries and dataclasses."""
    leaves, opened = tree_leaves(values), set()
    for leaf in leaves:  # grows by the fields of dataclasses
        if is_dataclass(leaf) and not isinstance(leaf, type) and id(leaf) not in opened:
            opened.add(id(leaf))
            leaves += tree_leaves([getattr(leaf, part.name, None) for part in fields(leaf)])
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def random_like(tensor: Tensor) -> Tensor:
    """Odd multiples of 1/16 in (-1, 1): few bits, so products and quotients are exact in half precision."""
    return (2 * torch.empty_like(tensor).random_(-8, 8, generator=drawing(tensor.device)) + 1) / 16


def run(function: Any, args: Any, kwargs: Any) -> tuple[Any, list[Tensor]]:
    """Call a function. Returns the result of the call, and the tensors that the call made or changed.

    If the function returns one of its arguments, the result is a view of it.
    """
    versions = [(tensor, tensor._version) for tensor in tensors([args, kwargs])]
    result = function(*args, **kwargs)
    changed = [tensor for tensor, version in versions if tensor._version != version]
    if not changed and any(result is tensor for tensor, _ in versions):
        result = result.view_as(result)
    return result, changed or tensors(result)


def random_scale(channels: int) -> Tensor:
    """Random powers of two of both signs. Rounding does not change products with them. Shape (C,).

    The largest power exceeds the bounds in a model (clamp), and is exact in bfloat16 when 1 is added or subtracted.
    """
    powers = torch.tensor([-128.0, -8.0, -2.0, 2.0, 8.0, 128.0])
    return powers[torch.empty(channels, dtype=torch.int64).random_(6, generator=drawing(powers.device))]


def scaled_axis(before: Tensor, after: Tensor, factor: Tensor) -> int | None:
    """The axis along which `after` is `before` times a factor, as a negative index.

    0: `before` and `after` are equal. None: they differ in another way.

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
    """The ways in which a call may multiply a parameter with the channels: along which axis, and in which rows.

    Of a joint matrix of q, k and v, it may multiply any consecutive thirds with them.
    """
    for axis in reversed(range(len(shape))):
        if shape[axis] == channels:
            yield Scaling(axis)
    if shape == (3 * channels, channels):
        for start, end in combinations(range(0, 4 * channels, channels), 2):
            yield Scaling(1, slice(start, end))


def trial(function: Any, args: Any, kwargs: Any) -> Callable[..., list[Tensor]]:
    """A function that repeats a call with random numbers in place of all floats, and returns its results.

    Each argument of that function changes some of these numbers: (id of a tensor of the call, `Scaling`, factor). If
    the call itself draws random numbers, it draws the same ones each time.
    """
    drawn = {id(t): random_like(t) if t.is_floating_point() else t for t in tensors([args, kwargs])}
    devices = {tensor.device for tensor in drawn.values() if tensor.is_cuda}

    def outputs(*changes: tuple[int, Scaling, Tensor]) -> list[Tensor]:
        numbers = drawn | {key: scaling.scaled(drawn[key], by).to(drawn[key].dtype) for key, scaling, by in changes}
        with torch.random.fork_rng(list(devices)):
            return run(function, *tree_map_only(Tensor, lambda t: numbers[id(t)].clone(), (args, kwargs)))[1]

    return outputs


def propagate_scale(
    norm: Value, outputs: Callable[..., list[Tensor]], inputs: list[tuple[Tensor, Value]], made: list[Value]
) -> None:
    """Record along which axis of a call's results a norm's channels lie, or by which parameters the call reads them.

    Args:
        norm: the norm.
        outputs: the `trial` of the call.
        inputs: the tensors that the call reads, and their values.
        made: the values that the call made.
    """
    axes = [(tensor, value.channels[norm]) for tensor, value in inputs if norm in value.channels]
    factor = random_scale({tensor.size(axis) for tensor, axis in axes}.pop())
    channels = [(id(tensor), Scaling(axis), factor) for tensor, axis in axes]
    before = outputs()
    passed = [scaled_axis(old, new, factor) for old, new in zip(before, outputs(*channels))]
    shown = all(result.numel() for result in before)  # empty results (an expert without tokens) show nothing
    if shown and None not in passed and any(passed):
        for value, axis in zip(made, passed):
            value.channels.update({norm: axis} if axis else {})
        return
    parameters = [(tensor, value) for tensor, value in inputs if value.made_by == PARAMETER]
    ways = [(tensor, way, value) for tensor, value in parameters for way in candidates(tensor.shape, len(factor))]
    # One call may multiply the channels with three matrices: those of queries, keys and values. In attention to one
    # key, the queries' matrix reads the channels without an effect.
    for readers in chain.from_iterable(combinations(ways, number) for number in (1, 2, 3)):
        undone = [(id(tensor), way, 1 / factor) for tensor, way, _ in readers]
        if all(map(torch.equal, before, outputs(*channels, *undone))):
            return norm.readings.extend((way, value) for _, way, value in readers)
    if not shown or None in passed:
        norm.readings.append((None, made[0]))


def written_scale(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[list[Scaling], int]:
    """How a module's parameters scale its output, if the module is a norm: one number for each channel.

    Returns:
        The scaling of each parameter, and the axis of the output that they scale, from the end. ([], 0): the module is
        no norm.
    """
    parameters = dict(module.named_parameters(recurse=False))
    shape, *others = {parameter.shape for parameter in module.parameters()} or {torch.Size()}
    channels = max(shape, default=1)
    if len(parameters) < len(list(module.parameters())) or others or not 1 < channels == shape.numel():
        return [], 0
    outputs = trial(partial(torch.func.functional_call, module), (parameters, args, kwargs), {})
    before, factor = outputs(), random_scale(channels)
    if [tensor.shape for tensor in before] != [args[0].shape]:
        return [], 0
    for offsets in product((0.0, 1.0), repeat=len(parameters)):
        written = [Scaling(shape.index(channels), offset=offset) for offset in offsets]
        (after,) = outputs(*((id(p), scaling, factor) for p, scaling in zip(parameters.values(), written)))
        if axis := scaled_axis(before[0], after, factor):
            return written, axis
    return [], 0
