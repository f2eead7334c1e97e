"""Where Admin acts in a model: its sites, found in the graph of one forward.

A site is a sum x + f(x) that nothing but a norm reads, as Post-LN has (in Pre-LN the sum goes on). x is its shortcut:
the term on which the other depends. With each site the graph gives what the fold needs: the norm that wrote x, and the
weights that read x, all of which have to undo a scale that only the shortcut is to have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AdminError
from .folding import whole
from .reading import Reader, Value
from .trace import UNSEEN, Trace

IN_PLACE = frozenset("add_ __iadd__".split())
ADDS = IN_PLACE | frozenset("add __add__ __radd__".split())
FACTOR = "add with alpha"  # a factor of the second term, which may be the branch
SAME = frozenset("view view_as reshape to type_as float contiguous".split())  # give the same numbers, in order


@dataclass(eq=False)
class Site:
    """A sum x + f(x) and its norm; `take` and `scale` are hooks."""

    name: str  # of the norm
    norm: Any
    offsets: dict[str, float]  # what the norm adds to each of its parameters
    taker: nn.Module  # the last module before the sum that is given x
    argument: int | str  # its argument that x is: the position or the keyword
    writer: str | None
    """The norm that wrote x. None: the first of a stack, whose input no norm wrote; its ω stays 1."""
    written: dict[str, float]  # that norm's parameters, by name in the model, and what it adds to each
    readers: dict[str, Reader]  # how parameters read x, by name
    inputs: frozenset[str]  # the arguments of the model's forward on which x depends
    shortcuts: dict[torch.device, Tensor] = field(default_factory=dict)
    """x, between the calls of the taker and of the norm; by device, for DataParallel runs a thread on each."""

    @property
    def omega(self) -> Tensor:
        """ω. Shape (C,)."""
        return torch.add(self.norm.omega_init, whole(self.norm.omega_delta)).detach()

    def set_omega(self, omega: Tensor | float) -> None:
        """Fill omega_init with one number; where no norm wrote the shortcut it stays 1."""
        if self.writer:
            self.norm.omega_init.fill_(omega)

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and saved: without x, which has the graph of the forward."""
        return {**vars(self), "shortcuts": {}}

    def shortcut(self, total: Tensor) -> Tensor:
        """The x of a sum; or AdminError."""
        if total.device not in self.shortcuts:
            raise AdminError(
                f"{self.name} ran without the module that takes its shortcut: is its branch left out at random, or the "
                "norm alone in a checkpoint? Multiply the branch by 0 instead; put the whole layer into the checkpoint."
            )
        return self.shortcuts[total.device]

    def take(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Remember x: a hook of the module that is given it."""
        x = args[self.argument] if isinstance(self.argument, int) else kwargs[self.argument]
        self.shortcuts[x.device] = x

    def scale(self, norm: Any, args: tuple) -> tuple:
        """Add (ω - 1) ⊙ x to the sum x + f(x): a hook of the norm that reads it."""
        # The sum may be of another type than x, as under autocast, and flat (OPT); it is to stay what it is.
        total = args[0]
        x = self.shortcut(total)
        del self.shortcuts[total.device]
        more = x * (norm.omega_init - 1 + norm.omega_delta).to(x.dtype)
        return total + more.to(total.dtype).reshape(total.shape), *args[1:]


def sum_of(norm: Value) -> tuple[Value, Value, Value | None] | None:
    """The sum that a norm alone reads; its shortcut, the first term, if a module took it; and what norm wrote that."""
    total = norm.reads[0]
    while total.made_by in SAME and total.readers == 1:
        total = total.reads[0]
    if total.made_by not in ADDS | {FACTOR} or total.readers != 1:
        return None
    x = min(total.reads, key=lambda value: value.time)
    if total.made_by == FACTOR and total.reads[0] is not x:
        return None
    if not any(time < total.time for _, _, time in x.takers):
        return None
    # Funnel pools positions: its norm wrote more than x.
    writers = [norm for norm, axis in x.channels.items() if axis == -1 and norm.size == x.size]
    return total, x, next(iter(writers), None)


def site_of(model: nn.Module, graph: Trace, name: str, taker: str | None) -> Site:
    """The site of a norm, with this module for its taker, or the last that it can have; or AdminError."""

    def refused(reason: str) -> AdminError:
        return AdminError(
            f"{type(model).__name__}: {reason}, so omega could not be folded away there. Name the norms that are to "
            "have one: sites={norm: module that is given its shortcut}."
        )

    sum_read = sum_of(graph.norms[name]) if name in graph.norms else None
    if sum_read is None:
        raise refused(f"{name} is not a norm that alone reads a sum x + f(x)")
    total, x, writer = sum_read
    if total.made_by in IN_PLACE and total.reads[0] is x:
        raise refused(f"{name} reads a sum that is written over its shortcut (x += f(x); write x = x + f(x))")
    if total.size != x.size > 0:  # of an argument it is not known
        raise refused(f"{name} reads a sum that is larger than its shortcut, which is repeated")
    written = writer.place if writer else None
    of_writer = set(model.get_submodule(written).parameters()) if written else set()
    for other, module in model.named_modules():
        if other != written and not of_writer.isdisjoint(module.parameters(recurse=False)):
            raise refused(f"{written} shares its parameters with {other}")
    for called in filter(None, [name, written]):
        if graph.called[called] > 1:
            raise refused(f"{called} is called {graph.called[called]} times")
    if any(name.startswith(UNSEEN) for name in total.depends - x.depends):
        raise refused(f"{name} reads what the trace cannot see (a custom autograd function?)")
    takers = [
        (model.get_submodule(module), argument)
        for module, argument, time in x.takers
        if time < total.time and graph.called[module] == 1 and taker in (None, module)
    ]
    if not takers:
        raise refused(f"the shortcut of {name} is not given to {taker or 'any module that is called once'}")
    readings = [reading for reading in writer.readings if reading != (None, total)] if writer else []
    for reader, value in readings:
        if reader is None:
            raise refused(f"the shortcut of {name} is also read by {value.made_by} in {value.place or 'the model'}")
        if [other for other, read in readings if read is value] != [reader] * value.readers:
            raise refused(f"{value.place} reads the shortcut of {name}, and something else")
    readers = {value.place: reader for reader, value in readings if reader}
    parameters = {f"{written}.{key}": offset for key, offset in writer.offsets.items()} if writer else {}
    norm, offsets = model.get_submodule(name), graph.norms[name].offsets
    return Site(name, norm, offsets, *takers[-1], written, parameters, readers, x.depends)


def find_sites(model: nn.Module, batch: Any, chosen: Mapping[str, str] | None) -> list[list[Site]]:
    """The sites of each stack of a model, in which one site's norm writes the next one's shortcut.

    Args:
        chosen: the norms that are to be sites, each with its taker. None: all that are.
    """
    graph = Trace(model, batch)
    sums = {name: found for name, norm in graph.norms.items() if (found := sum_of(norm))}
    # A sum whose shortcut no norm wrote is the first of a stack, in a layer as others are, or no site (embeddings).
    layers = {name: type(model.get_submodule(name.rpartition(".")[0])) for name in sums}
    inside = {layers[name] for name, (_, _, writer) in sums.items() if writer}
    takers = {name: None for name in sums if layers[name] in inside} if chosen is None else chosen
    forward = [*graph.norms, *takers]
    if not takers:
        raise AdminError(
            f"{type(model).__name__}: no site. None of its {len(graph.norms)} norms is alone in reading a sum x + f(x) "
            "of a norm's output x; in Pre-LN the sum goes on. Admin is for Post-LN."
        )
    stacks: dict[str | None, list[Site]] = {}  # by the norm of the last site
    for name in sorted(takers, key=forward.index):
        site = site_of(model, graph, name, takers[name])
        stacks[name] = [*stacks.pop(site.writer, []), site]
    return list(stacks.values())
