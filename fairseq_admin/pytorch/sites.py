"""Where Admin acts in a model: its sites, found in the graph of one forward.

A site is a sum x + f(x) that nothing but a norm reads, as Post-LN has (in Pre-LN the sum goes on). x is its shortcut:
the term on which the other depends. With each site the graph gives where x can be taken, and what the fold needs: the
norm that wrote x, and the weights that read x, all of which have to undo a scale that only the shortcut is to have.

x is taken in the smallest module call around the norm: it is that call's input, or what a module in it returned. So a
layer that is computed again, from a checkpoint, takes its own x again.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AdminError
from .folding import whole
from .reading import Handover, Reader, Value
from .trace import ADDS, IN_PLACE, TIMES, UNSEEN, Trace

FACTOR = "add with alpha"  # a factor of the second term, which may be the branch
SAME = frozenset("view view_as reshape to type_as float contiguous".split())  # give the same numbers, in order
GOES_ON = "reads a sum that goes on, as in Pre-LN"
UNRELATED = "reads a sum of which no term depends on the other"
FACTORED = "reads a sum with a factor at the shortcut, as DeepNorm's"
KEEP = 'unfoldable="keep" trains it with an omega that could not be folded away'
SKIP = 'Give unfoldable="skip" to leave such norms out, or name those that are to have one: sites=[...].'
MOVES = SAME | frozenset("transpose permute flatten unflatten squeeze unsqueeze dropout __getitem__ Dropout".split())


@dataclass(eq=False)
class Site:
    """A sum x + f(x) and its norm; `take`, `take_result` and `scale` are hooks."""

    name: str  # of the norm
    norm: Any
    calls: int  # how often the norm is called
    offsets: dict[str, float]  # what the norm adds to each of its parameters
    sources: list[tuple[nn.Module, tuple[int, str] | None]]
    """The modules that are given x, as their argument of this position and keyword, or return it (None)."""
    learned: bool
    """Whether ω may move. Not in the first of a stack, whose input no norm wrote: its ω stays 1."""
    unfoldable: str  # why the fold cannot take ω away; "" if it can
    writer: str | None  # the norm that wrote x
    written: dict[str, float]  # that norm's parameters, by name in the model, and what it adds to each
    readers: dict[str, Reader]  # how parameters read x, by name
    inputs: frozenset[str]  # the arguments of the model's forward on which x depends
    shortcuts: dict[torch.device, Tensor] = field(default_factory=dict)
    """x, between the calls of a source and of the norm; by device, for DataParallel runs a thread on each."""

    @property
    def omega(self) -> Tensor:
        """ω. Shape (C,)."""
        return torch.add(self.norm.omega_init, whole(self.norm.omega_delta)).detach()

    def set_omega(self, omega: Tensor | float) -> None:
        """Fill omega_init with one number, if ω may move."""
        if self.learned:
            self.norm.omega_init.fill_(omega)

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and saved: without x, which has the graph of the forward."""
        return {**vars(self), "shortcuts": {}}

    def shortcut(self, total: Tensor) -> Tensor:
        """The x of a sum; or AdminError."""
        if total.device not in self.shortcuts:
            raise AdminError(
                f"{self.name} ran without the module that has its shortcut: is the norm alone in a checkpoint? Put the "
                "whole layer into the checkpoint. Is the branch left out at random? Multiply it by 0 instead."
            )
        return self.shortcuts[total.device]

    def hooks(self) -> Iterable[Any]:
        """Hang the hooks; their handles."""
        for source, argument in self.sources:
            if argument:
                yield source.register_forward_pre_hook(partial(self.take, *argument), with_kwargs=True)
            else:
                yield source.register_forward_hook(self.take_result)
        yield self.norm.register_forward_pre_hook(self.scale)

    def take(self, position: int, name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Remember x: a hook of a module that is given it, by position or by keyword."""
        x = args[position] if position < len(args) else kwargs[name]
        self.shortcuts[x.device] = x

    def take_result(self, module: nn.Module, args: tuple, x: Tensor) -> None:
        """Remember x: a hook of the module that returns it."""
        self.shortcuts[x.device] = x

    def scale(self, norm: Any, args: tuple) -> tuple:
        """Add (ω - 1) ⊙ x to the sum x + f(x): a hook of the norm that reads it."""
        # The sum may be of another type than x, as under autocast, and flat (OPT); it is to stay what it is.
        total = args[0]
        x = self.shortcut(total)
        del self.shortcuts[total.device]
        more = x * (norm.omega_init - 1 + norm.omega_delta).to(x.dtype)
        return total + more.to(total.dtype).reshape(total.shape), *args[1:]


def sum_of(norm: Value) -> tuple[Value, Value, str] | None:
    """The sum that a norm reads, its shortcut, and why it is no site ("" if it may be one). None: it reads no sum."""
    total = norm.reads[0]
    while total.made_by in SAME and total.readers == 1:
        total = total.reads[0]
    if total.made_by not in ADDS | {FACTOR} or len(total.reads) < 2:
        return None
    x, f = sorted(total.reads[:2], key=lambda value: value.time)
    before = f.ancestors()
    if total.readers > 1:
        return total, x, GOES_ON
    if total.made_by == FACTOR and total.reads[0] is not x:
        return total, x, FACTORED
    if x in before or any(name.startswith(UNSEEN) for name in f.depends - x.depends):
        return total, x, ""
    if x.made_by in TIMES and before.intersection(x.reads) or f.made_by in TIMES and x.ancestors() & {*f.reads}:
        return total, x, FACTORED
    return total, x, UNRELATED


def writer_of(x: Value) -> Value | None:
    """The norm that wrote all of a shortcut; not one that wrote more, as where Funnel pools positions."""
    return next((norm for norm, axis in x.channels.items() if axis == -1 and norm.size == x.size), None)


def from_norm(x: Value) -> bool:
    """Whether a norm wrote a shortcut, or more, of which it is a part or another order."""
    while x.made_by in MOVES:
        x = x.reads[0]
    return x.made_by == "norm"


def handovers_of(graph: Trace, norm: str, total: Value, x: Value) -> list[Handover]:
    """Where x can be taken: in the smallest module call around the norm, best as that call's input."""
    around, last = graph.around[norm], graph.calls[norm][-1]
    handovers = list(x.handovers)
    while x.made_by in SAME and x.size == x.reads[0].size:
        x = x.reads[0]
        handovers += x.handovers

    def rank(handover: Handover) -> tuple[int, bool, bool]:
        shared = len(commonprefix([handover.calls, around]))
        return shared, shared == len(handover.calls), handover.argument is None

    # A module that is called again before the norm would leave another x.
    usable = [
        handover
        for handover in handovers
        if handover.time < total.time
        and handover.call == max(call for call in graph.calls[handover.module] if call < last)
    ]
    best = sorted(usable, key=rank)[-1:]
    # Transformers' layers put their forward into a checkpoint, without their hooks: take x inside again.
    inside = [handover for handover in usable if best and rank(handover)[:2] == (rank(best[0])[0], False)]
    return best + inside[-1:]


def why_unsuited(total: Value, x: Value, handovers: list[Handover]) -> str:
    """Why ω cannot act in a sum; "" if it can."""
    if total.made_by in IN_PLACE and total.reads[0] is x:
        return "reads a sum that is written over its shortcut (x += f(x); write x = x + f(x))"
    if total.size != x.size > 0:  # of an argument it is not known
        return "reads a sum that is larger than its shortcut, which is repeated"
    return "" if handovers else "has a shortcut that no module is given or returns; put its layer in a module"


def readers_of(graph: Trace, norm: Value, total: Value, x: Value) -> tuple[dict[str, Reader], str]:
    """How parameters read the shortcut of a norm, by name; and why ω could not be folded away, or ""."""
    writer = writer_of(x)
    for called in filter(None, [norm, writer]):
        if len(graph.calls[called.place]) > 1:
            verb = "is called" if called is norm else f"has its shortcut from {called.place}, which is called"
            return {}, f"{verb} {len(graph.calls[called.place])} times"
    if any(name.startswith(UNSEEN) for name in total.depends - x.depends):
        return {}, "reads what the trace cannot see (a custom autograd function?)"
    if not writer:
        return {}, ""
    modules = {name: module for module, name in graph.names.items()}
    of_writer = set(modules[writer.place].parameters())
    for other, module in modules.items():
        if other != writer.place and not of_writer.isdisjoint(module.parameters(recurse=False)):
            return {}, f"has its shortcut from {writer.place}, which shares its parameters with {other}"
    readings = [reading for reading in writer.readings if reading != (None, total)]
    for reader, value in readings:
        if reader is None:
            place = modules[value.place]
            lists = getattr(place, "parametrizations", {}).values()
            kinds = [type(part).__name__ for part in chain(place._forward_pre_hooks.values(), *lists)]
            weight = f", whose weight is under {' and '.join(kinds)}" if kinds else ""
            where = f"{value.made_by} in {value.place or type(place).__name__}{weight}{value.line}"
            return {}, f"has a shortcut that is also read by {where}"
        if [other for other, read in readings if read is value] != [reader] * value.readers:
            return {}, f"has a shortcut that {value.place} reads, with something else"
    return {value.place: reader for reader, value in readings if reader}, ""


def argument_of(module: nn.Module, argument: int | str | None) -> tuple[int, str] | None:
    """The position and the keyword of a module's argument, of which one is known."""
    names = list(inspect.signature(module.forward).parameters)
    if isinstance(argument, int):
        return argument, names[argument] if argument < len(names) else ""
    return argument and (names.index(argument) if argument in names else len(names), argument) or None


def find_sites(
    model: nn.Module, batch: Any, chosen: Iterable[str] | None, unfoldable: str
) -> tuple[list[list[Site]], dict[str, str]]:
    """The sites of each stack of a model, in forward order, and why other norms that read a sum are no sites.

    A site goes on with the stack of the last site before it on whose norm its shortcut depends.

    Args:
        chosen: the norms that are to be sites. None: all that are.
        unfoldable: "refuse" the model, "keep" ω, or "skip" the site, where ω could not be folded away.
    """
    graph = Trace(model, batch)
    sums = {name: sum_read for name, norm in graph.norms.items() if (sum_read := sum_of(norm))}
    reasons = {**graph.strangers, **{name: why for name, (_, _, why) in sums.items() if why}}
    if chosen is None:
        # A sum whose shortcut no norm wrote is the first of a stack, in a layer as others are, or no site (embeddings).
        layers = {name: type(model.get_submodule(name.rpartition(".")[0])) for name in sums.keys() - reasons.keys()}
        inside = {layer for name, layer in layers.items() if from_norm(sums[name][1])}
        chosen = [name for name, layer in layers.items() if layer in inside]
        reasons |= dict.fromkeys(layers.keys() - set(chosen), "reads a sum whose shortcut no norm wrote")
    elif wrong := [name for name in chosen if name not in sums or name in reasons]:
        raise AdminError(f"{wrong[0]} {reasons.get(wrong[0], 'is not a norm that alone reads a sum x + f(x)')}.")
    if not chosen:
        why = grouped(reasons) or "It has no norm that reads a sum"
        raise AdminError(
            f"{type(model).__name__}: no site, a norm that alone reads a sum x + f(x). {why}. Admin is for Post-LN."
        )
    stacks: list[list[Site]] = []
    for norm in sorted((graph.norms[name] for name in chosen), key=lambda norm: norm.time):
        name, (total, x, _) = norm.place, sums[norm.place]
        writer, handovers = writer_of(x), handovers_of(graph, norm.place, total, x)
        readers, cannot_fold = readers_of(graph, norm, total, x)
        unsuited, before = why_unsuited(total, x, handovers), x.ancestors()
        calls = len(graph.calls[name])
        if calls > 1 and any(h.module == name or len(graph.calls[h.module]) != calls for h in handovers):
            unsuited = unsuited or cannot_fold  # a call of the norm would be without x
        earlier = [site for stack in stacks for site in stack if graph.norms[site.name] in before]
        if earlier and unfoldable == "keep" and not writer:
            cannot_fold = cannot_fold or "has a shortcut that no norm wrote as it is"
        if unsuited or cannot_fold and unfoldable != "keep":
            keep = "" if unsuited else f"; {KEEP}"
            if unfoldable == "refuse":
                raise AdminError(f"{type(model).__name__}: {name} {unsuited or cannot_fold}{keep}. {SKIP}")
            reasons[name] = unsuited or cannot_fold
            continue
        modules = [(model.get_submodule(handover.module), handover.argument) for handover in handovers]
        site = Site(
            name=name,
            norm=model.get_submodule(name),
            calls=calls,
            offsets=norm.offsets,
            sources=[(module, argument_of(module, argument)) for module, argument in modules],
            learned=bool(writer or cannot_fold),
            unfoldable=cannot_fold,
            writer=writer.place if writer else None,
            written={f"{writer.place}.{key}": offset for key, offset in writer.offsets.items()} if writer else {},
            readers=readers,
            inputs=x.depends,
        )
        last = max(earlier, key=lambda site: graph.norms[site.name].time, default=None)
        stack = next((stack for stack in stacks if stack[-1] is last), None)
        if stack is None:
            stacks.append(stack := [])
        stack.append(site)
    if not any(site.learned for stack in stacks for site in stack):
        raise AdminError(f"{type(model).__name__}: no site has a shortcut that a norm wrote as it is; {KEEP}.")
    return stacks, reasons


def grouped(reasons: dict[str, str]) -> str:
    """Names by reason, a few of each."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return "; ".join(
        f"{', '.join(some[:3])}{f' and {len(some) - 3} more' * (len(some) > 3)} {reason}"
        for reason, some in names.items()
    )
