"""Who reads a norm's output, and with which weights: what the fold of a scale of its channels has to undo.

The channels are followed by their numbers: a tensor of the output's shape that counts them along its last axis goes
through every call that only moves numbers, so no call needs a rule of its own. The walk ends at calls that compute.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .trace import Call, Value, tensors

CASTS = frozenset("to type type_as float double half bfloat16 contiguous clone detach".split())
"""Calls that give the same numbers at the same places."""

SCALES = frozenset("mul mul_ __mul__ __rmul__ __imul__ div div_ __truediv__ __itruediv__".split())
FILLS = frozenset(["masked_fill", "masked_fill_"])
ELEMENTWISE = CASTS | SCALES | FILLS | {"dropout", "dropout_", "feature_dropout"}
"""Calls through which a scale of the channels passes, if they treat all channels of a position alike."""

MOVES = frozenset(
    "transpose permute view reshape flatten unflatten unsqueeze squeeze expand repeat narrow select chunk split unbind "
    "__getitem__ swapaxes movedim t T mT roll".split()
)
"""Calls that only put numbers elsewhere."""


@dataclass(frozen=True)
class Reader:
    """A parameter whose entries along `axis` multiply the channels; of a packed one, only in `rows` along axis 0."""

    parameter: str
    axis: int
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class Reading:
    """A call that reads a norm's output: as what value, with the channels along which axis (None: along several)."""

    call: Call
    value: Value
    axis: int | None


def through(value: Value, names: frozenset[str]) -> Value:
    """What a value was before calls of these names."""
    while value.maker is not None and value.maker.name in names:
        value = next(tensors(value.maker.args))
    return value


def read_by(value: Value) -> Iterator[Call]:
    """The calls that read a value, casts left out."""
    for call in value.readers:
        if call.name in CASTS:
            for output in call.outputs:
                yield from read_by(output)
        else:
            yield call


def channel_axis(labels: Tensor, channels: int) -> int | None:
    """The axis, from the end, along which channel numbers are 0 to C-1 at every position; None if there is none."""
    for axis in range(-1, -labels.dim() - 1, -1):
        if labels.size(axis) == channels and labels.movedim(axis, -1).eq(torch.arange(channels)).all():
            return axis
    return None


def passed(call: Call, value: Value, labels: Tensor, channels: int) -> list[Tensor]:
    """The channel numbers of what a call makes of a value, if a scale of the channels passes through; else none.

    Args:
        call: one that reads the value.
        labels: the channel numbers of the value. Shape of the value.
    """
    others = [other for other in call.reads if other is not value]
    if call.name in CASTS:
        return [labels]
    if call.name in ELEMENTWISE:
        axis = channel_axis(labels, channels)
        alike = axis is not None and all(len(other.shape) < -axis or other.shape[axis] == 1 for other in others)
        kept = call.outputs[0].shape == value.shape
        divides = "div" in call.name and call.args[0] is not value
        fills = call.name in FILLS and call.args[2] != 0
        return [labels] if alike and kept and not divides and not fills else []
    if call.name in MOVES and call.args[0] is value and not others:
        function = Tensor.reshape if call.name == "view" else call.function
        return list(tensors(function(labels, *call.args[1:], **call.kwargs)))
    return []


def readings(output: Value) -> Iterator[Reading]:
    """Every call that reads a norm's output, those left out through which a scale of its channels passes."""
    channels = output.shape[-1]

    def walk(value: Value, labels: Tensor) -> Iterator[Reading]:
        for call in value.readers:
            made = passed(call, value, labels, channels)
            if not made:
                yield Reading(call, value, channel_axis(labels, channels))
            for next_value, next_labels in zip(call.outputs, made):
                yield from walk(next_value, next_labels)

    return walk(output, torch.arange(channels, dtype=torch.int32).expand(output.shape))


def weights_of(reading: Reading) -> list[tuple[Value, Reader]]:
    """The parameters that multiply the channels in a linear call; none if it is no such call, or mixes positions in.

    Each with its value in the graph.
    """
    call, value, arguments = reading.call, reading.value, reading.call.args

    def reader(weight: Value, axis: int, at: int = -1, rows: tuple[int, int] | None = None) -> list:
        weight = through(weight, CASTS)
        return [(weight, Reader(weight.name, axis, rows))] if reading.axis == at and weight.kind == "parameter" else []

    if call.name == "linear" and arguments[0] is value:
        return reader(arguments[1], 1)
    if call.name == "addmm" and arguments[1] is value:
        return reader(arguments[2], 0)
    if call.name in ("matmul", "__matmul__", "mm") and arguments[0] is value and len(arguments[1].shape) == 2:
        return reader(arguments[1], 0)
    if call.name in ("conv1d", "conv2d") and arguments[0] is value:
        groups = arguments[6] if len(arguments) > 6 else call.kwargs.get("groups", 1)
        return reader(arguments[1], 1, at=-2 if call.name == "conv1d" else -3) if groups == 1 else []
    if call.name == "einsum":
        operands, (subscripts, _, result) = list(tensors(arguments)), arguments[0].replace(" ", "").partition("->")
        first, _, second = subscripts.partition(",")
        letter = first[-1]
        if len(operands) == 2 and operands[0] is value and second.count(letter) == 1 and letter not in result:
            return reader(operands[1], second.index(letter))
    if call.name == "multi_head_attention_forward":
        return [pair for side in _sides(call, value) for pair in reader(*side)]
    return []


def _sides(call: Call, value: Value) -> Iterator[tuple]:
    """Which projections of torch's attention read a value: weight, axis, axis of the value, rows."""
    bound = inspect.signature(functional.multi_head_attention_forward).bind(*call.args, **call.kwargs).arguments
    size = bound["embed_dim_to_check"]
    for number, side in enumerate(("query", "key", "value")):
        if bound[side] is value and bound.get("use_separate_proj_weight"):
            yield bound[f"{side[0]}_proj_weight"], 1, -1, None
        elif bound[side] is value:
            yield bound["in_proj_weight"], 1, -1, (number * size, (number + 1) * size)
