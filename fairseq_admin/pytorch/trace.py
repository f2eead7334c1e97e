"""One forward of a model as a graph: which call made each tensor, what it read, and how its result depends on that.

A `TorchDispatchMode` sees every call below autograd, also those of scripted and compiled functions, and hooks see which
modules run and what they return. A tensor is known by its place in memory: a module that returns its argument, as a
dropout does in evaluation, returns the same value.

The graph keeps no tensor of floats. How a call depends on its inputs is found by trial, when somebody asks. The call is
repeated with random numbers in place of all floats, then with some of them scaled by a power of two, which rounding
does not change. There is no list of functions.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..core.undisturbed import undisturbed
from ..errors import AdminError
from .batch import arguments, call

LIBRARIES = (os.path.dirname(torch.__file__), os.path.dirname(__file__))
PARAMETER, ARGUMENT, HELD = "parameter", "argument", "held"
"""Origins of a value that no call made. HELD: a buffer, or a tensor that was made elsewhere, as by numpy."""
VIEW, WRITE = "view", "write"
"""A view of another value; a value that was written to by way of other views."""
SCALE, NEAR = 128.0, 16.0
"""By these, trials scale. SCALE is beyond the bounds in a model (clamp); in half precision, NEAR² does not overflow."""


def tensors(values: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples, dictionaries and dataclasses."""
    leaves, opened = tree_leaves(values), set()
    for leaf in leaves:  # grows by the fields of dataclasses
        if is_dataclass(leaf) and not isinstance(leaf, type) and id(leaf) not in opened:
            opened.add(id(leaf))
            leaves += tree_leaves([getattr(leaf, part.name, None) for part in fields(leaf)])
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def leaf_of(values: Any, place: Any) -> Any:
    """A leaf of nested lists, tuples and dictionaries."""
    return values if isinstance(values, Tensor) else tree_leaves(values)[place]


def with_leaf(values: Any, place: Any, leaf: Tensor) -> Any:
    """Nested lists, tuples and dictionaries with another leaf in one place."""
    if isinstance(values, Tensor):
        return leaf
    leaves, spec = tree_flatten(values)
    return tree_unflatten([*leaves[:place], leaf, *leaves[place + 1 :]], spec)


def floating(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and (tensor.is_floating_point() or tensor.is_complex())


def same(one: Tensor, other: Tensor, tolerance: float = 0.0) -> bool:
    """Whether two results are equal, but for numbers too small for all their bits, or up to a share of the largest."""
    if one.shape != other.shape or not floating(one):
        return torch.equal(one, other)
    largest = one[one.isfinite()].abs().max().item() if tolerance and one.isfinite().any() else 0.0
    allowed = max(tolerance * largest, 16 * torch.finfo(one.dtype).tiny)
    return torch.allclose(one, other, rtol=0, atol=allowed, equal_nan=True)


@dataclass(repr=False)
class Repeat:
    """A call that can be repeated with other numbers."""

    func: Any
    arguments: tuple[Any, Any]
    """Its arguments, with a `Value` in place of each tensor of floats."""
    known: dict[Any, Any] = field(default_factory=dict)
    """What trials have shown of calls like this one."""

    @cached_property
    def inputs(self) -> list[Value]:
        return [leaf for leaf in dict.fromkeys(tree_leaves(self.arguments)) if isinstance(leaf, Value)]

    @property
    def key(self) -> Any:
        """The same for calls that trials cannot tell apart, as those of layers that are alike."""
        kinds: dict[Any, Any] = {value: (number, value.kind) for number, value in enumerate(self.inputs)}
        leaves = [
            kinds.get(leaf) or ((id(leaf), leaf._version) if isinstance(leaf, Tensor) else repr(leaf))
            for leaf in tree_leaves(self.arguments)
        ]
        return (self.func, len(self.arguments[0]), *self.arguments[1], *leaves)

    def shown(self, question: Any, trial: Callable[[], Any]) -> Any:
        """The answer of a trial, which is not made twice for calls that are alike."""
        if question not in self.known:
            self.known[question] = trial()
        return self.known[question]

    def outputs(self, change: Callable[[Value, Tensor], Tensor], seed: int) -> list[Tensor]:
        """The results for random numbers, which `change` may change. [] if the call fails for such numbers."""
        numbers = {value: change(value, value.draw(seed + place)) for place, value in enumerate(self.inputs)}
        args, kwargs = tree_map(
            lambda leaf: (
                numbers[leaf] if isinstance(leaf, Value) else leaf.clone() if isinstance(leaf, Tensor) else leaf
            ),
            self.arguments,
        )
        with torch.random.fork_rng({tensor.device for tensor in numbers.values() if tensor.is_cuda}):
            torch.manual_seed(0)
            try:
                return tensors(self.func(*args, **kwargs))
            except Exception:  # random numbers are no probabilities and no positive matrices
                return []


@dataclass(eq=False, repr=False)
class Value:
    """The numbers of a tensor at one moment of a forward."""

    made_by: str
    """The name of the call that made it, or PARAMETER, ARGUMENT, HELD, VIEW or WRITE."""
    place: tuple[str, ...]
    """The names of the modules that ran then, outermost first. For a parameter: its names. (A tied one has several.)"""
    tensor: Tensor = field(kw_only=True)
    reads: list[Value] = field(default_factory=list)
    line: str = ""
    """The line of the model's code that made it."""
    repeat: Repeat | None = None
    index: int = 0
    """Which result of the call it is."""
    time: int = 0
    uses: int = 0
    """The number of values that were made of it."""
    readers: list[Value] = field(default_factory=list)
    """Those of them that are of floats."""
    returned: list[tuple[str, int, int]] = field(default_factory=list)
    """The modules that returned it, by name, its place in the leaves of what they returned, and when."""
    norm_of: Value | None = None
    """The sum that a norm reads to write this value."""
    adds: bool = False
    """Whether it adds its parts, rather than puts them next to one another. Known once `parts` is."""

    def __post_init__(self) -> None:
        tensor = self.tensor
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.live: bool = self.made_by == PARAMETER or any(value.live for value in self.reads)
        """Whether it depends on a parameter."""
        self.data: bool = self.made_by == ARGUMENT or any(value.data for value in self.reads)
        """Whether it depends on an argument."""
        self.signed, self.number, self.zero = True, None, False
        if tensor.is_floating_point() and tensor.layout == torch.strided and tensor.numel():
            low, high = (number.item() for number in torch.aminmax(tensor.detach()))
            self.signed, self.zero = not low >= 0, low == high == 0
            self.number = low if tensor.numel() == 1 and self.made_by != PARAMETER else None
        del self.tensor

    @property
    def weight(self) -> bool:
        """Whether it depends on parameters alone."""
        return self.live and not self.data

    @property
    def kind(self) -> Any:
        """All that trials depend on."""
        return self.shape, self.dtype, self.device, self.signed, self.number, self.weight, self.live

    def draw(self, seed: int) -> Tensor:
        """Random numbers of this value's shape, and of both signs if its own are."""
        if self.number is not None:
            return torch.full(self.shape, self.number, dtype=self.dtype, device=self.device)
        generator = torch.Generator(self.device).manual_seed(seed)
        numbers = torch.randn(self.shape, dtype=self.dtype, device=self.device, generator=generator)
        return numbers if self.signed else numbers.abs()

    def result(self, change: Callable[[Value, Tensor], Tensor] = lambda _, t: t, seed: int = 0) -> Tensor | None:
        """This value when its call is repeated; None if that shows nothing, because it fails, or gives zeros."""
        made = self.repeat.outputs(change, seed) if self.repeat else []
        result = made[self.index] if self.index < len(made) else None
        return result if result is not None and floating(result) and result.any() else None

    def degree(self, scaled: dict[Value, int]) -> int | None:
        """The power of a factor with which this value grows when each of `scaled` grows with a power of it.

        None: with no power.
        """
        if self.repeat is None:
            return scaled.get(self.reads[0]) if self.made_by == VIEW else None
        powers = tuple(scaled.get(value, 0) for value in self.repeat.inputs)

        def trial() -> int | None:
            before = self.result()
            after = self.result(lambda value, numbers: numbers * NEAR ** scaled.get(value, 0))
            if before is None or after is None:
                return None
            power = next((d for d in (0, 1, -1, 2, -2) if same(before * NEAR**d, after, 0.01)), None)
            other = self.result(seed=100) if power == 0 else None
            return None if power == 0 and (other is None or same(before, other)) else power  # it reads but a shape

        shown: int | None = self.repeat.shown((self.index, powers), trial)
        return shown

    @cached_property
    def sets(self) -> list[tuple[Value, ...]]:
        """The smallest sets of values that, scaled together, scale this value: weight and bias, or the input of a mask.

        Sets of weights come first.
        """
        if self.repeat is None:
            return [tuple(self.reads)] if self.reads else []
        inputs = self.repeat.inputs

        def trial() -> list[list[int]]:
            before = self.result()
            found = list[set[Value]]()
            sizes = sorted({*(range(1, 4) if len(inputs) < 8 else (1,)), len(inputs)})
            for chosen in itertools.chain.from_iterable(itertools.combinations(inputs, size) for size in sizes):
                if before is not None and not any(smaller.issubset(chosen) for smaller in found):
                    factor = NEAR if before.dtype == torch.half else SCALE
                    factors = dict.fromkeys(chosen, factor)
                    after = self.result(lambda value, numbers, by=factors: numbers * by.get(value, 1.0))  # type: ignore
                    found += [{*chosen}] if after is not None and same(before * factor, after) else []
            found.sort(key=lambda values: not all(value.weight for value in values))
            return [[number for number, value in enumerate(inputs) if value in values] for values in found]

        return [tuple(inputs[number] for number in way) for way in self.repeat.shown((self.index, "sets"), trial)]

    @cached_property
    def parts(self) -> dict[Value, float]:
        """The values of which this one is a sum, or the one of which it is a copy, a part or masked; and their factors.

        {}: it is something else.
        """
        if self.repeat is None:
            return dict.fromkeys(self.reads, 1.0)
        ways = [way for way in self.sets if all(v in way or v.weight or not v.live for v in self.repeat.inputs)]
        if len(ways) != 1 or self.data and all(part.weight for part in ways[0]):  # weights write it, as in an embedding
            return {}
        (way,) = ways

        def alone(part: Value, power: int, value: Value, numbers: Tensor) -> Tensor:
            if value is part:
                return numbers**power
            return torch.zeros_like(numbers) if value in way else numbers if value.number else numbers**0

        def trial() -> tuple[list[float], bool]:
            ones: list[Any] = []
            for part in way:
                one, numbers, square = (self.result(partial(alone, part, power)) for power in (0, 1, 2))
                # Each number has to be one of the part's, times a factor.
                if one is None or numbers is None or square is None or not same(square * one, numbers**2, 0.01):
                    return [], False
                ones.append(one)
            adds = torch.stack([one != 0 for one in ones]).sum(0) > 1
            return [one.flatten()[one.abs().argmax()].item() for one in ones], bool(adds.any())

        factors, self.adds = self.repeat.shown((self.index, "parts"), trial)
        if not factors and len(way) == 1 and len(way[0].parts) > 1 and not way[0].adds:  # stack((x, f)).sum(0)
            factors, self.adds = [1.0], True
        return dict(zip(way, factors))

    def depends_on(self, others: set[Value], but_by: Iterable[Value] = ()) -> bool:
        """Whether it was computed from one of these values, but by way of some."""
        first = min((value.time for value in others), default=0)
        known, new = {*but_by}, {self}
        while new:
            known |= new
            reads = {read for value in new for read in value.reads}
            if not others.isdisjoint(reads):
                return True
            new = {read for read in reads - known if read.time > first}
        return False


def users_line() -> str:
    """The file and the line of the model's code that runs now."""
    stack = traceback.walk_stack(sys._getframe())
    file, line = next((f.f_code.co_filename, n) for f, n in stack if not f.f_code.co_filename.startswith(LIBRARIES))
    return f" ({os.path.basename(file)}:{line})"


class Graph(TorchDispatchMode):
    """The graph of one forward. The constructor runs that forward, in evaluation mode but for norms over a batch.

    Args:
        model: the model; afterwards it is as it was.
        batch: the arguments of a forward (see `batch`).
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, batch: Any) -> None:
        super().__init__()
        self.model = model
        self.classes = {name: type(module) for name, module in model.named_modules()}
        self.running: list[str] = []
        self.clock = itertools.count(1)
        self.known: dict[Any, dict[Any, Any]] = {}
        """What trials have shown of calls, by `Repeat.key`."""
        self.values: list[Value] = []
        """All values of floats that calls made, in the order of the forward."""
        self.returned: dict[str, list[dict[int, Value]]] = {name: [] for name in self.classes}
        """What each call of a module returned: the values of its leaves."""
        self.memories: dict[Any, tuple[Any, dict[Any, Value], list[Value]]] = {}
        """For each memory: a reference that keeps its address, the values by their view of it, and what was written."""
        every = [*model.parameters(), *model.buffers(), *tensors(arguments(batch))]
        if torch.is_inference_mode_enabled() or any(tensor.is_meta or tensor.is_inference() for tensor in every):
            raise AdminError("attach and fold cannot follow torch.inference_mode or the meta device; use neither.")
        with undisturbed(model) as undo, unchanged(model):
            model.eval()  # may change weights: some adapters merge theirs here
            self.parameters = {}
            for name, parameter in model.named_parameters(remove_duplicate=False):
                self.parameters[name] = value = self.enter_value(parameter, PARAMETER)
                value.place = (*value.place, name)
            for tensor in tensors(arguments(batch)):
                self.enter_value(tensor, ARGUMENT)
            for name, module in model.named_modules():
                if isinstance(module, _NormBase):  # with its running statistics it would be no norm
                    module.training = True
                if not isinstance(module, torch.jit.ScriptModule):  # those take no hooks
                    undo.callback(module.register_forward_pre_hook(partial(self.enter, name)).remove)
                    undo.callback(module.register_forward_hook(partial(self.leave, name)).remove)
            torch.clear_autocast_cache()
            undo.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)
            with self:
                self.result = call(model, batch)
        self.outputs = {value for returned in self.returned[""] for value in returned.values()}
        for value in reversed(self.values):  # views and further results (LayerNorm's mean) that nothing reads
            if not value.readers and value not in self.outputs and (value.made_by == VIEW or value.index):
                for read in {*value.reads}:
                    read.readers.remove(value)

    def memory(self, tensor: Tensor) -> tuple[Any, Any]:
        """The entry in `memories` of a tensor, and the view that the tensor is of it."""
        try:
            reference: Any = StorageWeakRef(tensor.untyped_storage())
            key, view = reference.cdata, (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        except (NotImplementedError, RuntimeError):
            if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                raise AdminError("attach and fold cannot follow torch.vmap; call the module without it.") from None
            key, reference, view = id(tensor), tensor, None  # type: ignore[assignment]  # sparse
        return self.memories.setdefault(key, (reference, {}, [])), view

    def enter_value(self, tensor: Tensor, made_by: str) -> Value:
        """Know a tensor that no call made, unless it is known already: two parameters of one memory are one."""
        (_, values, _), view = self.memory(tensor)
        return values.setdefault(view, Value(made_by, (), tensor=tensor))  # type: ignore[no-any-return]

    def value(self, tensor: Tensor) -> Value:
        """The value that a tensor has now."""
        (_, values, written), view = self.memory(tensor)
        known: Value = values.get(view) or self.enter_value(tensor, HELD)
        if later := [value for value in written if value.time > known.time]:
            known = values[view] = self.made(WRITE, tensor, [known, *later])
        return known

    def made(self, name: str, tensor: Tensor, reads: list[Value], repeat: Any = None, index: int = 0) -> Value:
        """A new value that a call made."""
        value = Value(name, tuple(self.running), reads, users_line(), repeat, index, next(self.clock), tensor=tensor)
        for read in {*reads}:
            read.uses += 1
            read.readers += [value] if floating(tensor) else []
        self.values += [value] if floating(tensor) else []
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = tensors([args, kwargs])
        read = {id(tensor): self.value(tensor) for tensor in inputs}
        bases = {id(self.memory(tensor)[0]): read[id(tensor)] for tensor in inputs}
        call = tree_map(lambda leaf: read[id(leaf)] if floating(leaf) else leaf, (args, kwargs))
        result = func(*args, **kwargs)
        name, schema = func.__name__.partition(".")[0], getattr(func, "_schema", None)
        pairs = [*zip(schema.arguments, args), *((a, kwargs.get(a.name)) for a in schema.arguments)] if schema else []
        written = [leaf for a, leaf in pairs if a.alias_info and a.alias_info.is_write and isinstance(leaf, Tensor)]
        values = list(dict.fromkeys(read.values()))
        if "_like" in name or name.startswith("new_"):
            values = []  # it reads no numbers, only a shape
        elif name in ("copy_", "fill_", "zero_"):
            values = values[1:]  # it writes over its first argument
        repeat = Repeat(func, call)
        repeat.known = self.known.setdefault(repeat.key, {})
        for index, tensor in enumerate(tensors(result) or written):
            memory, view = self.memory(tensor)
            if written or id(memory) not in bases:
                memory[1][view] = self.made(name, tensor, values, repeat if values else None, index)
                memory[2].extend([memory[1][view]] if written else [])
            elif memory[1].get(view) is not (base := bases[id(memory)]):  # it may be the same view again
                memory[1][view] = self.made(VIEW, tensor, [base])
        return result

    def enter(self, name: str, *_: Any) -> None:
        """Hook: a module begins to run."""
        self.running.append(name)

    def leave(self, name: str, module: nn.Module, args: Any, result: Any) -> None:
        """Hook: a module returns."""
        while self.running.pop() != name:  # modules that raised an error
            pass
        with _disable_current_modes():
            leaves = {i: self.value(leaf) for i, leaf in enumerate(tree_leaves(result)) if isinstance(leaf, Tensor)}
        self.returned[name].append(leaves)
        for place, value in leaves.items():
            value.returned.append((name, place, next(self.clock)))


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore buffers, as of BatchNorm, and the random states of Python and numpy."""
    kept = [(m, name, b, b.clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    state, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = numpy and numpy.random.get_state()
    try:
        yield
    finally:
        for module, name, buffer, numbers in kept:
            module._buffers[name] = buffer
            buffer.copy_(numbers)
        random.setstate(state)
        if numpy:
            numpy.random.set_state(numpy_state)
