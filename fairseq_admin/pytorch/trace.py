"""One forward of a model as a graph: which call made each tensor, which calls read it, which modules were given it.

A `TorchFunctionMode` sees every call of a torch function, and hooks see every call of a module. A norm counts as one
call, whatever its forward does. The trace follows a scale of the norm's output channels through all later calls (see
`channel_flow`).

Tensors are told apart by identity. A call that changes a tensor in place gives that tensor a new `Value`. A module that
returns its own argument, as a dropout does in evaluation, returns a view of it during the trace. The graph keeps no
tensor of the forward except the result.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections import Counter
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from ..core.undisturbed import undisturbed
from ..errors import AdminError
from . import channel_flow as flow
from .batch import argument_names, arguments, by_name, call
from .channel_flow import Call, Handover, Value, tensors

LIBRARIES = (os.path.dirname(torch.__file__), os.path.dirname(__file__))
IN_PLACE = frozenset("add_ __iadd__".split())
ADDS = IN_PLACE | frozenset("add __add__ __radd__".split())
TIMES = frozenset("mul __mul__ __rmul__".split())
SAME = frozenset("view view_as reshape to type_as float contiguous".split())
"""Functions whose result has the same numbers in the same order."""
MOVES = frozenset("transpose permute swapaxes movedim".split())
"""Functions that put axes into another order."""


def users_line() -> str:
    """The file and the line of the model's code that runs now."""
    stack = traceback.walk_stack(sys._getframe())
    file, line = next((f.f_code.co_filename, n) for f, n in stack if not f.f_code.co_filename.startswith(LIBRARIES))
    return f" ({os.path.basename(file)}:{line})"


class Trace(TorchFunctionMode):
    """The graph of one forward. The constructor runs that forward, in evaluation mode.

    Args:
        model: the model; afterwards it is as it was.
        batch: the arguments of a forward (see `batch`).
    """

    def __init__(self, model: nn.Module, batch: Any) -> None:
        super().__init__()
        self.model = model
        self.names = {module: name for name, module in model.named_modules()}
        self.running = [Call("")]
        self.norm: object = None
        """The norm that runs now. Calls inside a norm are not recorded."""
        self.calls: Counter[str] = Counter()
        """The number of calls of each module, by name."""
        self.norms: dict[str, Value] = {}
        """The output of the last call of each norm, by name."""
        scripted = [name for module, name in self.names.items() if isinstance(module, torch.jit.ScriptModule)]
        self.strangers = dict.fromkeys(scripted, "is scripted, so attach cannot see into it")
        """Modules that normalise a sum but are not norms with weights, and scripted modules, by name, and why."""
        self.types: set[torch.dtype] = set()
        """The floating types in which the model computes."""
        self.values: MutableMapping[Tensor, Value] = WeakTensorKeyDictionary()
        every = [*model.parameters(), *model.buffers(), *tensors(arguments(batch))]
        if torch.is_inference_mode_enabled() or any(tensor.is_meta or tensor.is_inference() for tensor in every):
            raise AdminError("attach and fold cannot follow torch.inference_mode or the meta device; use neither.")
        for module, name in self.names.items():  # buffers, and plain attributes
            self.values.update({tensor: Value(flow.HELD, Call(name)) for tensor in tensors(vars(module))})
        shared: dict[int, Value] = {}  # parameters of one memory (b.data = a.data) are one value
        for name, parameter in model.named_parameters():
            place = parameter.data_ptr() or id(parameter)
            self.values[parameter] = shared.setdefault(place, Value(flow.PARAMETER, Call(name)))
        for name, argument in by_name(model, batch).items():
            self.values.update({tensor: Value(flow.ARGUMENT, Call(name)) for tensor in tensors(argument)})
        with undisturbed(model) as undo:
            model.eval()  # may change weights: some adapters merge theirs here
            # Scripted modules take no hooks.
            for module in [module for module, name in self.names.items() if name not in scripted]:
                undo.callback(module.register_forward_pre_hook(self.enter, with_kwargs=True).remove)
                undo.callback(module.register_forward_hook(self.leave, with_kwargs=True).remove)
            with self:
                self.result = call(model, batch)

    def value(self, tensor: Tensor) -> Value:
        """The graph node of a tensor's current numbers."""
        origin = flow.UNSEEN if tensor.is_floating_point() else flow.HELD
        return self.values.setdefault(tensor, Value(origin, self.running[-1]))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.norm:
            return func(*args, **kwargs)
        inputs = [(tensor, self.value(tensor)) for tensor in tensors([args, kwargs])]
        result, tensors_made = flow.run(func, args, kwargs)
        if self.renames(func.__name__, args, result):
            self.values[result] = self.value(args[0])
            return result
        name = func.__name__ if kwargs.get("alpha", 1) == 1 else f"{func.__name__} with alpha"
        if ("layer_norm" in name or "rms_norm" in name) and self.value(args[0]).made_by in ADDS:
            self.strangers[self.running[-1].module] = f"calls {name}, but not as norm(x), a module with weights"
        made = self.record(name, [value for _, value in inputs], tensors_made)
        if args and name in MOVES:  # the sizes of this example say where each axis goes
            made[0].order = tuple(func(torch.empty(tuple(range(result.dim()))), *args[1:], **kwargs).shape)
        # The numbers of empty_like are chance.
        for norm in {norm for _, value in inputs for norm in value.channels} if made and "empty" not in name else ():
            flow.propagate_scale(norm, flow.trial(func, args, kwargs), inputs, made)
        return result

    def renames(self, name: str, args: tuple, result: Any) -> bool:
        """Whether a call returns the numbers of its first argument, with the channels along the same axes."""
        x = args[0] if args else None
        numbers = [number for number in args if isinstance(number, (int, float))]
        neutral = name in TIMES and numbers == [1] or name in ADDS and numbers == [0]
        if not isinstance(x, Tensor) or not x.is_floating_point() or not (name in SAME or neutral):
            return False
        value = self.value(x)
        axes = [-x.dim()] if value.made_by == flow.PARAMETER else value.channels.values()
        return all(result.shape[axis:] == x.shape[axis:] for axis in axes)

    def record(self, name: str, reads: list[Value], made: list[Tensor]) -> list[Value]:
        """Record the tensors that a call made and read, unless it made none (a shape or a type)."""
        line = users_line()
        values = [Value(name, self.running[-1], tensor.numel(), reads, line) for tensor in made]
        self.values.update(zip(made, values))
        self.types.update(tensor.dtype for tensor in made if tensor.is_floating_point())
        for value in set(reads) if made else ():
            value.readers += 1
        return values

    def enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Record the call of a module and its arguments."""
        if self.norm:
            return
        call = Call(self.names[module], self.running[::-1])
        self.calls[call.module] += 1
        self.running.append(call)
        for argument, tensor in {**dict(zip(argument_names(module), args)), **kwargs}.items():
            self.hand_over(call, argument, tensor)
        if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            self.norm = self  # the trial itself is not recorded
            self.written, self.axis = flow.written_scale(module, args, kwargs)
            self.norm = module if self.axis else None

    def hand_over(self, call: Call, argument: str, tensor: Any) -> None:
        """Record that a module is given a tensor now, or returns it."""
        if isinstance(tensor, Tensor):
            self.value(tensor).handovers.append(Handover(call, argument))

    def leave(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], result: Any) -> Any:
        """Record the result of a module."""
        if self.norm not in (None, module):
            return None
        if self.norm:
            x = self.value(args[0])
            parameters = [self.value(parameter) for parameter in module.parameters()]
            (norm,) = self.record(flow.NORM, [x, *parameters], [result])
            norm.written, norm.channels = list(zip(self.written, parameters)), {norm: self.axis}
            self.norms[norm.call.module] = norm
            for other in x.channels:
                other.readings.append((None, norm))
        self.norm = None
        returned = isinstance(result, Tensor) and any(result is x for x in (*args, *kwargs.values()))
        if returned and not isinstance(module, nn.Identity):
            result = result[...]  # a dropout returns its argument in evaluation, other numbers in training
        self.hand_over(self.running.pop(), "", result)
        return result
