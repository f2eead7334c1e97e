"""Where Admin acts in a model: its sites, found in the graph of one forward.

A site is a sum x + f(x) that nothing but a norm reads, as Post-LN has (in Pre-LN the sum goes on). x is its shortcut:
the term on which the other depends. With each site the graph gives what the fold needs: the norm that wrote x, and the
weights that read x, all of which have to undo a scale that only the shortcut is to have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import AdminError
from .reading import Reader
from .trace import UNSEEN, Call, Trace, Value, trace

ADDS = frozenset("add add_ __add__ __radd__ __iadd__".split())
SAME = frozenset("view reshape to type_as float contiguous".split())
"""Calls that give the same numbers in the same order."""


@dataclass(eq=False)
class Site:
    """A sum x + f(x) and its norm, by the names of modules and parameters; `take` and `scale` are hooks."""

    norm: str
    taker: str
    """The last module before the sum that is given x."""
    argument: int | str
    """As which x is given to it: the argument's position or keyword."""
    writer: str | None
    """The norm that wrote x. None: the first of a stack, whose input no norm wrote; its ω stays 1."""
    readers: list[Reader]
    inputs: frozenset[str]
    """The arguments of the model's forward on which x depends."""
    shortcut: Tensor | None = None
    """x, between the call of the module that takes it and that of the norm."""

    def take(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Remember x: a hook of the module that is given it."""
        self.shortcut = args[self.argument] if isinstance(self.argument, int) else kwargs[self.argument]

    def scale(self, norm: Any, args: tuple) -> tuple:
        """Add (ω - 1) ⊙ x to the sum x + f(x): a hook of the norm that reads it."""
        x, self.shortcut = self.shortcut, None
        assert x is not None, "the norm ran without the module that takes its shortcut"
        # The sum may be of another type than x, as under autocast, and flat (OPT); it is to stay what it is.
        more = x * (norm.omega_init - 1 + norm.omega_delta).to(x.dtype)
        return args[0] + more.to(args[0].dtype).reshape(args[0].shape), *args[1:]


def writer_of(x: Value) -> Call | None:
    """The norm that wrote a shortcut, all of it (Funnel's pools positions)."""
    return next((norm for norm, axis in x.channels.items() if axis == -1 and norm.size == x.size), None)


def sum_of(norm: Call) -> tuple[Call, Value] | None:
    """The addition that a norm alone reads, and its shortcut: the term that was first, if a module was given it."""
    total, add = norm.reads[0], norm.reads[0].maker
    while add is not None and add.name in SAME and len(total.readers) == 1:
        total, add = add.reads[0], add.reads[0].maker
    if add is None or add.name not in ADDS or len(total.readers) != 1:
        return None
    x = min(add.reads, key=lambda value: value.maker.time if value.maker else -1)
    return (add, x) if any(time <= add.time for _, _, time in x.takers) else None


def site_of(graph: Trace, norm: Call, taker: str | None) -> Site:
    """The site of a norm.

    Args:
        taker: the module that is given the shortcut. None: the last that is.

    Raises:
        AdminError: there is no such sum, the hooks could not scale its shortcut, or the fold not undo it.
    """
    name, found = norm.module, sum_of(norm)
    if found is None:
        raise AdminError(f"{name} reads no sum x + f(x) alone")
    add, x = found
    writer = writer_of(x)
    for called in [name] if writer is None else [name, writer.module]:
        if graph.entered[called] > 1:
            raise AdminError(f"{called} is called {graph.entered[called]} times")
    if UNSEEN in norm.reads[0].depends - x.depends:
        raise AdminError(f"{name} reads what the trace cannot see (a custom autograd function?)")
    takers = [
        (m, key) for m, key, time in x.takers if time <= add.time and graph.entered[m] == 1 and taker in (None, m)
    ]
    if not takers:
        given = f"{taker} is not" if taker else "no module that is called once is"
        raise AdminError(f"{given} given the shortcut of {name}")
    readings = [reading for reading in writer.readings if reading != (None, add)] if writer else []
    for reader, call in readings:
        if reader is None:
            raise AdminError(f"the shortcut of {name} is also read by {call.name} in {call.module or 'the model'}")
        for other in graph.parameters[reader.parameter].readers:
            if (reader, other) not in readings:
                place = other.module or "the model"
                raise AdminError(f"{reader.parameter} reads the shortcut of {name}, and something else in {place}")
    readers = [reader for reader in dict.fromkeys(reader for reader, _ in readings) if reader]
    return Site(name, *takers[-1], writer.module if writer else None, readers, x.depends)


def find_sites(
    model: nn.Module, args: tuple, batch: dict[str, Any], chosen: Mapping[str, str] | None
) -> list[list[Site]]:
    """The sites of each stack of a model: one site's norm writes the next one's shortcut.

    Args:
        args, batch: what a forward takes.
        chosen: the norms that are to be sites, and the module that takes the shortcut of each. None: all that are.

    Raises:
        AdminError: there is none, or one whose ω could not be folded away.
    """
    graph = trace(model, args, batch)
    norms = {call.module: call for call in graph.calls if call.name == "norm"}
    layers = {name: type(model.get_submodule(name.rpartition(".")[0])) for name in norms}
    sums = {name: found[1] for name, norm in norms.items() if (found := sum_of(norm))}
    # A sum whose shortcut no norm wrote is the first of a stack, in a layer as others are, or no site (embeddings).
    inside = {layers[name] for name, x in sums.items() if writer_of(x)}
    takers = {name: None for name in sums if layers[name] in inside} if chosen is None else chosen
    if not takers:
        raise AdminError(
            f"{type(model).__name__}: no site. None of its {len(norms)} norms is alone in reading a sum x + f(x) of a "
            "norm's output x; in Pre-LN the sum goes on. Admin is for Post-LN."
        )
    stacks: list[list[Site]] = []
    for name, taker in takers.items():
        try:
            if name not in norms:
                raise AdminError(f"{name} is not a norm")
            site = site_of(graph, norms[name], taker)
        except AdminError as error:
            raise AdminError(
                f"{type(model).__name__}: {error}, so omega could not be folded away there. Name the norms that are to "
                "have one: sites={norm: module that is given its shortcut}."
            ) from None
        stack = next((stack for stack in stacks if stack[-1].norm == site.writer), [])
        stacks += [] if stack else [stack]
        stack.append(site)
    return stacks
