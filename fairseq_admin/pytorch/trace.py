"""One forward of a model as a graph: which call made each tensor, which calls read it, which modules were given it.

A `TorchFunctionMode` sees every call of a torch function, and hooks see every call of a module. A norm is one call,
whatever its forward does; so is whatever torch offers as one function (`linear`, `multi_head_attention_forward`).

Tensors are known by identity. A call in place makes another `Value` of the same tensor, and a call that returns its own
argument (dropout in evaluation) is made to return a view of it, so that two moments of the forward are two values.
No tensor is kept: the graph has names, shapes and arguments only.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

READS_NOTHING = frozenset(
    "zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full new_tensor "
    "size dim is_floating_point".split()
)
"""Calls that take a tensor for its shape, type or device alone."""

READS_FIRST_ONLY = frozenset(["to", "type_as", "expand_as", "view_as", "reshape_as"])
"""Calls that take their other tensors for the same."""


@dataclass(frozen=True)
class Taking:
    """A module that was given a tensor: its name, the argument's name and position, and when."""

    module: str
    argument: str
    position: int
    time: int


@dataclass(eq=False)
class Value:
    """A tensor at one moment of the forward."""

    shape: tuple[int, ...]
    maker: Call | None = None
    """The call that made it. None: a parameter, an argument of the model, or a constant."""
    kind: str = ""
    """Of one that no call made: a "parameter", a "buffer", an "argument" of the model's forward, or "unknown" floats,
    which come from what no mode sees: a custom autograd function, a scripted one."""
    name: str = ""
    readers: list[Call] = field(default_factory=list)
    takers: list[Taking] = field(default_factory=list)


@dataclass(eq=False)
class Call:
    """A call of a torch function, or of a norm (whose `name` is "norm"), with values in the places of tensors."""

    name: str
    function: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    module: str
    """The module in which it ran; of a norm, the norm itself."""
    time: int
    outputs: list[Value] = field(default_factory=list)

    @property
    def reads(self) -> list[Value]:
        """The values whose numbers count."""
        if self.name in READS_NOTHING:
            return []
        read = self.args[:1] if self.name in READS_FIRST_ONLY else [self.args, self.kwargs]
        return list(dict.fromkeys(tensors(read)))


def is_norm(module: nn.Module) -> bool:
    """Whether it is a norm over the last dimension with a weight: torch's, or one whose class is called so."""
    weight = getattr(module, "weight", None)
    return (
        "norm" in type(module).__name__.lower()
        and not isinstance(module, (nn.modules.batchnorm._NormBase, nn.GroupNorm))
        and isinstance(weight, nn.Parameter)
        and weight.dim() == 1
        and not any(module.children())
    )


def tensors(values: Any) -> Iterator[Any]:
    """The tensors, or the values in their places, in nested lists, tuples and dictionaries."""
    if isinstance(values, (Tensor, Value)):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors(value)
    elif isinstance(values, dict):
        yield from tensors(list(values.values()))


class Trace(TorchFunctionMode):
    """The graph of one forward; `calls` has them in order."""

    def __init__(self, model: nn.Module, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.inside: list[str] = []
        """The modules that are running, the outermost first."""
        self.norm_input: Value | None = None
        """Of the norm that is running."""
        self.values: Any = WeakTensorKeyDictionary()
        self.entered: Counter[str] = Counter()
        """How often each module was called."""
        named = {"parameter": model.named_parameters(), "buffer": model.named_buffers(), "argument": arguments.items()}
        for kind, pairs in named.items():
            for name, entry in pairs:
                for tensor in tensors(entry):
                    self.values[tensor] = Value(tuple(tensor.shape), kind=kind, name=name)

    def value(self, tensor: Tensor) -> Value:
        """What a tensor is now."""
        if tensor not in self.values:
            self.values[tensor] = Value(tuple(tensor.shape), kind="unknown" if tensor.is_floating_point() else "")
        return self.values[tensor]

    def replaced(self, arguments: Any) -> Any:
        """Arguments with values in the places of tensors."""
        if isinstance(arguments, Tensor):
            return self.value(arguments)
        if isinstance(arguments, (list, tuple)):
            return tuple(map(self.replaced, arguments))
        if isinstance(arguments, dict):
            return {key: self.replaced(argument) for key, argument in arguments.items()}
        return arguments

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        # of a property, such as Tensor.T, the function is its __get__
        name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
        if self.norm_input is not None:
            return func(*args, **kwargs)
        call = Call(name, func, self.replaced(args), self.replaced(kwargs), self.inside[-1], len(self.calls))
        result = func(*args, **kwargs)
        if (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__":
            self.record(call, args[0])
        else:
            if any(result is argument for argument in tensors(args)):
                result = result.view_as(result)
            self.record(call, result)
        return result

    def record(self, call: Call, results: Any) -> None:
        """Note a call and what it made, unless it made no tensor: a shape, a type."""
        for tensor in tensors(results):
            call.outputs.append(Value(tuple(tensor.shape), maker=call))
            self.values[tensor] = call.outputs[-1]
        if call.outputs:
            self.calls.append(call)
            for value in call.reads:
                value.readers.append(call)

    def enter(self, name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Note that a module is called, and with what."""
        self.inside.append(name)
        self.entered[name] += 1
        if self.norm_input is not None:
            return
        names = list(inspect.signature(module.forward).parameters)
        for argument, tensor in [*zip(names, args), *kwargs.items()]:
            if isinstance(tensor, Tensor):
                position = names.index(argument) if argument in names else len(names)
                self.value(tensor).takers.append(Taking(name, argument, position, len(self.calls)))
        if is_norm(module) and args and isinstance(args[0], Tensor):
            self.norm_input = self.value(args[0])

    def leave(self, name: str, module: nn.Module, result: Any) -> None:
        """Note that a module has returned."""
        self.inside.pop()
        if self.norm_input is not None and is_norm(module):
            call = Call("norm", module.forward, (self.norm_input,), {}, name, len(self.calls))
            self.norm_input = None
            self.record(call, result)


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
    arguments = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    recorded = Trace(model, {**arguments, **arguments.get("kwargs", {})})
    handles = []
    for name, module in model.named_modules():

        def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any], name: str = name) -> None:
            recorded.enter(name, module, args, kwargs)

        def leave(module: nn.Module, args: tuple, result: Any, name: str = name) -> None:
            recorded.leave(name, module, result)

        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave))
    try:
        with undisturbed(model):
            model.eval()
            with recorded:
                model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return recorded
