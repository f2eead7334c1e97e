"""One forward of a model as a graph: which call made each tensor, which calls read it, which modules were given it.

A `TorchFunctionMode` sees every call of a torch function, and hooks see every call of a module. A norm is one call,
whatever its forward does; a scale of its output's channels is followed through all calls (see `reading`). Tensors are
known by identity: a call in place makes another `Value` of the same tensor, and a call that returns its own argument
(dropout in evaluation) is made to return a view of it. No tensor is kept.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from .batch import Batch
from .reading import Reader, effect, run, tensors

UNSEEN = "?"
"""Stands among the arguments on which a value depends for what no mode sees: numpy, a custom autograd function."""


@dataclass(eq=False)
class Value:
    """A tensor at one moment of the forward."""

    size: int
    """How many numbers it has."""
    depends: frozenset[str] = frozenset()
    """The arguments of the model's forward on which it depends."""
    parameter: str = ""
    """Its name, if it is one."""
    maker: Call | None = None
    readers: list[Call] = field(default_factory=list)
    takers: list[tuple[str, Any, int]] = field(default_factory=list)
    """The modules that were given it: name, the argument's position or keyword, before which call."""
    channels: dict[Call, int] = field(default_factory=dict)
    """The norms whose output's channels it has, so that a scale of them scales it, and their axis, from the end."""


@dataclass(eq=False)
class Call:
    """A call of a torch function, or of a norm."""

    name: str
    module: str
    """The module in which it ran; of a norm, the norm itself."""
    time: int
    reads: list[Value]
    size: int = 0
    channels: int = 0
    """Of a norm: how many numbers, and channels, its output has."""
    readings: list[tuple[Reader | None, Call]] = field(default_factory=list)
    """Of a norm: the calls that read these channels, and with which parameter; None: a scale cannot be undone there."""


def is_norm(module: nn.Module) -> bool:
    """Whether it is a norm over the last dimension with a weight: torch's, or one whose class is called so."""
    weight = getattr(module, "weight", None)
    others = (nn.modules.batchnorm._NormBase, nn.GroupNorm)
    named = "norm" in type(module).__name__.lower() and not isinstance(module, others)
    return named and isinstance(weight, nn.Parameter) and weight.dim() == 1 and not any(module.children())


class Trace(TorchFunctionMode):
    """The graph of one forward."""

    def __init__(self, model: nn.Module, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.inside: list[str] = []
        """The modules that are running, the outermost first."""
        self.norm_input: Value | None = None
        """Of the norm that is running."""
        self.entered: Counter[str] = Counter()
        """How often each module was called."""
        self.parameters = {name: Value(t.numel(), parameter=name) for name, t in model.named_parameters()}
        self.values: Any = WeakTensorKeyDictionary()
        self.values.update({tensor: self.parameters[name] for name, tensor in model.named_parameters()})
        self.values.update({tensor: Value(tensor.numel()) for tensor in model.buffers()})
        for name, argument in arguments.items():
            self.values.update({tensor: Value(tensor.numel(), frozenset([name])) for tensor in tensors(argument)})

    def value(self, tensor: Tensor) -> Value:
        """What a tensor is now."""
        unseen = frozenset([UNSEEN] if tensor.is_floating_point() else [])
        value: Value = self.values.setdefault(tensor, Value(tensor.numel(), unseen))
        return value

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self.norm_input is not None:
            return func(*args, **kwargs)
        inputs = {id(tensor): self.value(tensor) for tensor in tensors([args, kwargs])}
        result, changed = run(func, args, kwargs)
        if id(result) in inputs and not changed:
            result = result.view_as(result)
        call, outputs = self.record(func.__name__, list(inputs.values()), changed or tensors(result))
        names = {key: value.parameter for key, value in inputs.items() if value.parameter}
        for norm in {norm for value in inputs.values() for norm in value.channels} if outputs else ():
            axes = {key: value.channels[norm] for key, value in inputs.items() if norm in value.channels}
            found = effect((func, args, kwargs), axes, names, norm.channels)
            if not isinstance(found, list):
                norm.readings.append((found, call))
                continue
            for value, axis in zip(outputs, found):
                value.channels.update({} if axis is None else {norm: axis})
        return result

    def record(self, name: str, reads: list[Value], made: list[Tensor]) -> tuple[Call, list[Value]]:
        """Note a call and what it made, unless it made no tensor, but a shape or a type."""
        call = Call(name, self.inside[-1], len(self.calls), reads)
        depends = frozenset().union(*[value.depends for value in reads])
        outputs = [Value(tensor.numel(), depends, maker=call) for tensor in made]
        self.values.update(zip(made, outputs))
        for value in reads if made else ():
            value.readers.append(call)
        self.calls += [call] if made else []
        return call, outputs

    def enter(self, name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Note that a module is called, and with what."""
        self.inside.append(name)
        self.entered[name] += 1
        if self.norm_input is not None:
            return
        arguments: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        for argument, tensor in arguments.items():
            if isinstance(tensor, Tensor):
                self.value(tensor).takers.append((name, argument, len(self.calls)))
        if is_norm(module) and isinstance(arguments.get(0), Tensor):
            self.norm_input = self.value(args[0])

    def leave(self, name: str, module: nn.Module, args: tuple, result: Any) -> None:
        """Note that a module has returned."""
        if self.norm_input is not None and is_norm(module):
            call, (output,) = self.record("norm", [self.norm_input], [result])
            for norm in self.norm_input.channels:
                norm.readings.append((None, call))
            call.size, call.channels, output.channels[call] = output.size, result.shape[-1], -1
            self.norm_input = None
        self.inside.pop()


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """No gradients; random state, modes and autocast's cache are put back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    try:
        with torch.random.fork_rng(devices=list(devices)), torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        # The next forward must not find weights in autocast's cache that were cast without gradients.
        torch.clear_autocast_cache()


def trace(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Trace:
    """Record one forward, in evaluation mode: layerdrop would leave out layers."""
    graph = Trace(model, Batch(model, args, kwargs).named)
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(graph.enter, name), with_kwargs=True))
        handles.append(module.register_forward_hook(partial(graph.leave, name)))
    try:
        with undisturbed(model):
            model.eval()
            with graph:
                model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return graph
