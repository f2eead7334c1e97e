"""What a call does with a scale of channels in its input: it is tried, not looked up.

The call is made again with random numbers in the places of all floats, then with the channels scaled by powers of two,
of both signs, which no rounding sees:

    the same bits                               it reads no numbers, but a shape or a type
    bits scaled along an axis                   the scale passes (dropout, transpose, a mask)
    the same bits, with a parameter divided     its entries along an axis read the channels; the fold divides them
    anything else                               the scale cannot be undone there

So is what a norm writes, with its parameters scaled (`offsets`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, combinations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from .folding import scale


class Reader(NamedTuple):
    """How a parameter reads channels: its entries along an axis multiply them, in some of its rows."""

    axis: int
    rows: slice

    def divided(self, weight: Tensor, omega: Tensor) -> Tensor:
        """The parameter for channels that are ω times as large, float64."""
        whole = weight.double().clone()
        whole[self.rows] = scale(whole[self.rows], 1 / omega, self.axis)
        return whole


class Handover(NamedTuple):
    """A module's call that was given a tensor, or returned it, after the torch call of a number."""

    calls: tuple[int, ...]
    """The numbers of the module calls that were running, from the model's own to the one that was given the tensor or
    called what returned it."""
    call: int
    module: str
    argument: int | str | None  # position or keyword; None: the module returned the tensor
    time: int


@dataclass(eq=False)
class Value:
    """A tensor at one moment of a forward. The first that a call makes stands for the call, too."""

    made_by: str = ""
    """The torch function that made it, or "norm"; or "parameter"."""
    place: str = ""
    """The module in which that ran, of a norm the norm itself; the name of a parameter."""
    time: int = 0  # the number of the call
    size: int = 0  # how many numbers it has
    reads: list[Value] = field(default_factory=list)
    depends: frozenset[str] = frozenset()  # on which arguments of the model's forward
    line: str = ""  # of the model's code
    readers: int = 0  # how many calls read it
    handovers: list[Handover] = field(default_factory=list)
    """Where a module was given it, or returned it."""
    channels: dict[Value, int] = field(default_factory=dict)
    """The norms whose output's channels it has, so that a scale of them scales it, and their axis, from the end."""
    offsets: dict[str, float] = field(default_factory=dict)  # of a norm: what it adds to each parameter
    readings: list[tuple[Reader | None, Value]] = field(default_factory=list)
    """Of a norm: how they are read, and by which parameter; or None, and the call where a scale cannot be undone."""

    def ancestors(self) -> set[Value]:
        """What it was computed from, and it."""
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
    """Odd sixteenths between -1 and 1: with few bits, so that half precision has their products and shares, too."""
    return (2 * torch.randint_like(tensor, -8, 8) + 1) / 16


def run(function: Any, args: Any, kwargs: Any) -> tuple[Any, list[Tensor]]:
    """What a function returns, and the tensors that it made or changed. An argument that it returns becomes a view."""
    versions = [(tensor, tensor._version) for tensor in tensors([args, kwargs])]
    result = function(*args, **kwargs)
    changed = [tensor for tensor, version in versions if tensor._version != version]
    if not changed and any(result is tensor for tensor, _ in versions):
        result = result.view_as(result)
    return result, changed or tensors(result)


def candidates(shape: torch.Size, channels: int) -> Iterator[Reader]:
    """The ways in which a parameter may read channels; one matrix of q, k and v may in some of its thirds."""
    for axis in reversed(range(len(shape))):
        if shape[axis] == channels:
            yield Reader(axis, slice(None))
    if shape == (3 * channels, channels):
        for start, end in combinations(range(0, 4 * channels, channels), 2):
            yield Reader(1, slice(start, end))


def follow(norm: Value, call: tuple[Any, Any, Any], inputs: dict[int, Value], made: list[Value]) -> None:
    """Note where a norm's channels are in what a call makes of its inputs (by id), or that it reads them, and how."""
    function, *arguments = call
    drawn = {id(t): random_like(t) if t.is_floating_point() else t for t in tensors(arguments)}
    axes = {key: value.channels[norm] for key, value in inputs.items() if norm in value.channels}
    channels = {drawn[key].size(axis) for key, axis in axes.items()}.pop()
    factor = 2.0 ** torch.randint(1, 4, (channels,)) * (2 * torch.randint(2, (channels,)) - 1)

    def outputs(changed: dict[int, Tensor]) -> list[Tensor]:
        numbers = {**drawn, **changed}
        return run(function, *tree_map_only(Tensor, lambda t: numbers[id(t)].clone(), arguments))[1]

    def scaled(tensor: Tensor, axis: int) -> Tensor:
        return scale(tensor, factor, axis).to(tensor.dtype)

    def axis_of(old: Tensor, new: Tensor) -> int | None:
        """Where it is scaled, counted from the end; 0: nowhere; None: not so."""
        if torch.equal(old, new):
            return 0
        axes = [axis for axis in range(-old.dim(), 0) if old.is_floating_point() and old.size(axis) == channels]
        return next((axis for axis in axes if torch.equal(scaled(old, axis), new)), None)

    changed = {key: scaled(drawn[key], axis) for key, axis in axes.items()}
    before = outputs({})
    passed = list(map(axis_of, before, outputs(changed)))
    if None not in passed and all(t.numel() for t in before):  # of nothing, as an expert may be given, nothing is known
        for value, axis in zip(made, passed):
            value.channels.update({norm: axis} if axis else {})
        return
    parameters = {key: value for key, value in inputs.items() if value.made_by == "parameter"}
    single = [(key, reader) for key in parameters for reader in candidates(drawn[key].shape, channels)]
    columns = [(key, reader) for key, reader in single if drawn[key].dim() == 2 and reader == (1, slice(None))]
    # Queries, keys and values may have a matrix each in one call.
    for readers in chain(combinations(single, 1), combinations(columns, 2), combinations(columns, 3)):
        divided = {key: reader.divided(drawn[key], factor).to(drawn[key].dtype) for key, reader in readers}
        if all(map(torch.equal, before, outputs({**changed, **divided}))):
            return norm.readings.extend((reader, parameters[key]) for key, reader in readers)
    norm.readings.append((None, made[0]))


def offsets(norm: nn.Module, args: tuple) -> dict[str, float]:
    """What a norm adds to each of its parameters, by name: with (p + offset) scaled, it writes the same, scaled.

    It is 0, or of a weight that begins at 0 it is 1; as for readers it is tried. Empty: neither is so.
    """
    x, drawn = random_like(args[0]), {name: random_like(p) for name, p in norm.named_parameters()}
    factor = torch.randint_like(next(iter(drawn.values())), 1, 4).exp2()
    before = torch.func.functional_call(norm, drawn, (x, *args[1:]))
    unseen = 16 * torch.finfo(before.dtype).tiny  # numbers so small have fewer bits
    for added in product((0.0, 1.0), repeat=len(drawn)):
        tried = {name: (p + more) * factor - more for (name, p), more in zip(drawn.items(), added)}
        written = torch.func.functional_call(norm, tried, (x, *args[1:]))
        if len(factor) != x.size(-1) or torch.allclose(written, before * factor.to(before.dtype), rtol=0, atol=unseen):
            return dict(zip(drawn, added))  # whose channels are elsewhere (SqueezeBERT), no reader undoes
    return {}
