"""One forward of a model as a graph: which call made each tensor, which calls read it, which modules were given it.

A `TorchFunctionMode` sees every call of a torch function, and hooks see every call of a module. A norm is one call,
whatever its forward does; a scale of its output's channels is followed through all calls (see `reading`). Tensors are
known by identity: a call in place makes another `Value` of the same tensor, and a call that returns its own argument,
as a dropout does in evaluation, is made to return a view of it. No tensor is kept.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from .batch import by_name, call
from .reading import Value, follow, offsets, run, tensors

UNSEEN = "?"
"""How the names begin that stand for what no mode sees, one a tensor: of numpy, a custom autograd function."""
TIMES = frozenset("mul __mul__ __rmul__".split())  # by 1 they give the same numbers, as of a factor that DeepNorm has


def is_norm(module: nn.Module, x: object = None, *_: object) -> bool:
    """Whether it is a norm: its class is called so, and its parameters, all its own, have a number a channel."""
    others = (nn.modules.batchnorm._NormBase, nn.GroupNorm)
    named = "norm" in type(module).__name__.lower() and not isinstance(module, others)
    if not (named and isinstance(x, Tensor) and x.is_floating_point()):
        return False
    own, every = list(module.parameters(recurse=False)), list(module.parameters())
    return 0 < len(own) == len(every) and all(p.shape == own[0].shape == (p.numel(),) != (1,) for p in own)


class Trace(TorchFunctionMode):
    """The graph of one forward, which it runs in evaluation mode.

    It has how often each module was `called`, and what the last call of each norm gave.
    """

    def __init__(self, model: nn.Module, batch: Any) -> None:
        super().__init__()
        self.names = {module: name for name, module in model.named_modules()}
        self.running: list[str] = []
        self.norm: object = None  # the one that runs: what is called in it is not noted
        self.called: Counter[str] = Counter()
        self.norms: dict[str, Value] = {}
        self.time = 0
        self.unseen = itertools.count()
        self.values: MutableMapping[Tensor, Value] = WeakTensorKeyDictionary()
        held = tensors([vars(module) for module in self.names])  # buffers, and what is a plain attribute
        self.values.update({tensor: Value() for tensor in held})
        self.values.update({tensor: Value("parameter", name) for name, tensor in model.named_parameters()})
        for name, argument in by_name(model, batch).items():
            self.values.update({tensor: Value(depends=frozenset([name])) for tensor in tensors(argument)})
        with undisturbed(model) as undo, self:
            model.eval()
            for module in self.names:
                undo.callback(module.register_forward_pre_hook(self.enter, with_kwargs=True).remove)
                undo.callback(module.register_forward_hook(self.leave, with_kwargs=True).remove)
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
        made = self.record(name, list(inputs.values()), tensors_made)
        for norm in {norm for value in inputs.values() for norm in value.channels} if made else ():
            follow(norm, (func, args, kwargs), inputs, made)
        return result

    def record(self, name: str, reads: list[Value], made: list[Tensor]) -> list[Value]:
        """Note what a call made and what it read, unless it made no tensor, but a shape or a type."""
        self.time += 1
        depends = frozenset().union(*[value.depends for value in reads])
        values = [Value(name, self.running[-1], self.time, tensor.numel(), reads, depends) for tensor in made]
        self.values.update(zip(made, values))
        for value in reads if made else ():
            value.readers += 1
        return values

    def enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Note that a module is called, and with what."""
        if self.norm:
            return
        name = self.names[module]
        self.running.append(name)
        self.called[name] += 1
        for argument, tensor in [*enumerate(args), *kwargs.items()]:
            if isinstance(tensor, Tensor):
                self.value(tensor).takers.append((name, argument, self.time))
        self.norm = module if is_norm(module, *args) else None

    def leave(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], result: Any) -> Any:
        """Note that a module has returned. One that returns its argument, as a dropout of one's own, gives a view."""
        if self.norm not in (None, module):
            return None
        if self.norm and isinstance(result, Tensor):
            x = self.value(args[0])
            (norm,) = self.record("norm", [x], [result])
            for other in x.channels:
                other.readings.append((None, norm))
            self.norm = self  # any that is no module's
            norm.offsets = offsets(module, args)
            norm.channels.update({norm: -1} if norm.offsets else {})
            self.norms[norm.place] = norm
        self.norm = None
        given = any(result is x for x in (*args, *kwargs.values())) and not isinstance(module, nn.Identity)
        view = result.view_as(result) if given and isinstance(result, Tensor) else None
        self.running.pop()
        return view


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[contextlib.ExitStack]:
    """No gradients, layerdrop or nested tensors; afterwards all is as it was, and what the stack was given is done."""
    switches = {"training", "layerdrop", "use_nested_tensor"}
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    with torch.random.fork_rng(list(devices)), torch.no_grad(), contextlib.ExitStack() as undo:
        # The next forward must not find weights in autocast's cache that were cast without gradients.
        undo.callback(torch.clear_autocast_cache)
        for module in model.modules():
            undo.callback(getattr(module, "reshard", list))  # FSDP leaves the root's parameters whole after a forward
            attributes = vars(module)
            before = {key: attributes[key] for key in switches & attributes.keys()}
            undo.callback(attributes.update, before)
            attributes.update(dict.fromkeys(before.keys() - {"training"}, False))
        yield undo
