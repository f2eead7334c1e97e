"""One forward of a model as a graph: which call made each tensor, which calls read it, which modules were given it.

A `TorchFunctionMode` sees every call of a torch function, and hooks see every call of a module. A norm is one call,
whatever its forward does; a scale of its output's channels is followed through all calls (see `reading`). Tensors are
known by identity: a call in place makes another `Value` of the same tensor, and a call that returns its own argument,
as a dropout does in evaluation, is made to return a view of it. No tensor is kept.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from .batch import by_name, call
from .reading import Handover, Value, follow, offsets, run, tensors

LIBRARIES = (os.path.dirname(torch.__file__), os.path.dirname(__file__))
UNSEEN = "?"
"""How the names begin that stand for what no mode sees, one a tensor: of numpy, a custom autograd function."""
IN_PLACE = frozenset("add_ __iadd__".split())
ADDS = IN_PLACE | frozenset("add __add__ __radd__".split())
TIMES = frozenset("mul __mul__ __rmul__".split())  # by 1 they give the same numbers, as of a factor that DeepNorm has


def why_no_norm(module: nn.Module) -> str | None:
    """Why it is not taken for a norm: "" if it is one, None if it does not look like one.

    The class of a norm is called so, and its parameters, all its own, have a number a channel.
    """
    own, every = list(module.parameters(recurse=False)), list(module.parameters())
    channels = 0 < len(own) == len(every) and all(p.shape == own[0].shape == (p.numel(),) != (1,) for p in own)
    if "norm" not in type(module).__name__.lower():
        kind = type(module).__name__
        return f"is no norm by its class's name, {kind}; call it {kind}Norm if it is one" if channels else None
    if channels and not isinstance(module, (nn.modules.batchnorm._NormBase, nn.GroupNorm)):
        return ""
    return None if every else "has no weight, into which omega could be folded"


def users_line() -> str:
    """The file and the line of the model's code that is running."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(LIBRARIES):
        frame = frame.f_back
    return f" ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"


class Trace(TorchFunctionMode):
    """The graph of one forward, which it runs in evaluation mode.

    It has the numbers of each module's `calls`, what the last call of each of the `norms` gave, and the `strangers`,
    which read a sum and are not taken for norms, and why.
    """

    def __init__(self, model: nn.Module, batch: Any) -> None:
        super().__init__()
        self.names = {module: name for name, module in model.named_modules()}
        self.running = [("", 0)]  # modules, and the numbers of their calls
        self.numbers = itertools.count(1)
        self.norm: object = None  # the one that runs: what is called in it is not noted
        self.calls: defaultdict[str, list[int]] = defaultdict(list)
        self.around: dict[str, tuple[int, ...]] = {}  # the calls in which a module was called last
        self.norms: dict[str, Value] = {}
        self.strangers: dict[str, str] = {}
        self.time = 0
        self.unseen = itertools.count()
        self.values: MutableMapping[Tensor, Value] = WeakTensorKeyDictionary()
        held = tensors([vars(module) for module in self.names])  # buffers, and what is a plain attribute
        self.values.update({tensor: Value() for tensor in held})
        self.values.update({tensor: Value("parameter", name) for name, tensor in model.named_parameters()})
        for name, argument in by_name(model, batch).items():
            self.values.update({tensor: Value(depends=frozenset([name])) for tensor in tensors(argument)})
        with undisturbed(model) as undo:
            model.eval()  # which may compute, as adapters do that are merged
            for module in self.names:
                undo.callback(module.register_forward_pre_hook(self.enter, with_kwargs=True).remove)
                undo.callback(module.register_forward_hook(self.leave, with_kwargs=True).remove)
            with self:
                call(model, batch)

    def value(self, tensor: Tensor) -> Value:
        """What a tensor is now."""
        if tensor not in self.values:
            unseen = [f"{UNSEEN}{next(self.unseen)}"] if tensor.is_floating_point() else []
            self.values[tensor] = Value(depends=frozenset(unseen))
        return self.values[tensor]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.norm:
            return func(*args, **kwargs)
        inputs = {id(tensor): self.value(tensor) for tensor in tensors([args, kwargs])}
        result, tensors_made = run(func, args, kwargs)
        numbers = [number for number in args if isinstance(number, (int, float))]
        if func.__name__ in TIMES and numbers == [1] and len(inputs) == 1:
            (self.values[result],) = inputs.values()
            return result
        name = func.__name__ if kwargs.get("alpha", 1) == 1 else f"{func.__name__} with alpha"
        if "layer_norm" in name or "rms_norm" in name:
            self.stranger(self.running[-1][0], args[0], f"calls {name}, which is no module; make it an nn.LayerNorm")
        made = self.record(name, list(inputs.values()), tensors_made)
        for norm in {norm for value in inputs.values() for norm in value.channels} if made else ():
            follow(norm, (func, args, kwargs), inputs, made)
        return result

    def record(self, name: str, reads: list[Value], made: list[Tensor]) -> list[Value]:
        """Note what a call made and what it read, unless it made no tensor, but a shape or a type."""
        self.time += 1
        depends = frozenset().union(*[value.depends for value in reads])
        line = users_line()
        values = [Value(name, self.running[-1][0], self.time, tensor.numel(), reads, depends, line) for tensor in made]
        self.values.update(zip(made, values))
        for value in reads if made else ():
            value.readers += 1
        return values

    def enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Note that a module is called, and with what."""
        if self.norm:
            return
        number, name = next(self.numbers), self.names[module]
        self.running.append((name, number))
        self.calls[name].append(number)
        given: list[tuple[Any, Any]] = [*enumerate(args), *kwargs.items()]
        for argument, tensor in given:
            if isinstance(tensor, Tensor):
                self.value(tensor).handovers.append(self.handover(name, number, argument))
        x = args[0] if args else None
        if isinstance(x, Tensor) and x.is_floating_point():
            why = why_no_norm(module)
            self.norm = module if why == "" else None
            self.around[name] = tuple(call for _, call in self.running[:-1])
            self.stranger(name, x, why)

    def handover(self, name: str, number: int, argument: int | str | None = None) -> Handover:
        """That a module is given a tensor now, or returns it."""
        return Handover(tuple(number for _, number in self.running), number, name, argument, self.time)

    def stranger(self, name: str, x: Tensor, why: str | None) -> None:
        """Note why something that reads a sum is not taken for a norm."""
        if why and self.value(x).made_by in ADDS:
            self.strangers.setdefault(name, why)

    def leave(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], result: Any) -> Any:
        """Note that a module has returned. If it returns its argument, as some dropouts do, return a view instead."""
        if self.norm not in (None, module):
            return None
        if self.norm and isinstance(result, Tensor):
            x = self.value(args[0])
            (norm,) = self.record("norm", [x], [result])
            for other in x.channels:
                other.readings.append((None, norm))
            self.norm = self  # any that is no module's
            norm.offsets = offsets(module, args)
            if norm.offsets and result.size(-1) == next(module.parameters()).numel():
                norm.channels[norm] = -1
                self.norms[norm.place] = norm
            else:  # as SqueezeBERT's, whose channels come first
                self.strangers[norm.place] = "does not scale the last dimension by its weight"
        self.norm = None
        name, number = self.running.pop()
        if not isinstance(result, Tensor):
            return None
        if any(result is x for x in (*args, *kwargs.values())) and not isinstance(module, nn.Identity):
            result = result.view_as(result)
            self.value(result).made_by = type(module).__name__  # which may give other numbers in training
        self.value(result).handovers.append(self.handover(name, number))
        return result


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[contextlib.ExitStack]:
    """No gradients, layerdrop or nested tensors; afterwards all is as it was, and what the stack was given is done."""
    switches = {"layerdrop", "use_nested_tensor"}
    modes = {module: module.training for module in model.modules()}
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}

    def restore_modes() -> None:
        """By `train`, with which adapters may merge."""
        for module, training in modes.items():
            if module.training != training:
                module.train(training)

    with torch.random.fork_rng(list(devices)), torch.no_grad(), contextlib.ExitStack() as undo:
        # The next forward must not find weights in autocast's cache that were cast without gradients.
        undo.callback(torch.clear_autocast_cache)
        undo.callback(restore_modes)
        for module in modes:
            undo.callback(getattr(module, "reshard", list))  # FSDP leaves the root's parameters whole after a forward
            attributes = vars(module)
            before = {key: attributes[key] for key in switches & attributes.keys()}
            undo.callback(attributes.update, before)
            attributes.update(dict.fromkeys(before, False))
        yield undo
