"""The sites of a model, found in the graph of one forward, and the hooks that scale their shortcuts.

A site is a sum x + f(x) that only a norm reads, as in Post-LN. (In Pre-LN the sum goes on.) x is the shortcut: the term
on which another term depends. For each site the graph also says where hooks can take x, and what the fold needs: the
norm that wrote x, and the weights that read x. Those weights have to undo a scale that only the shortcut should have.

Hooks take x in the smallest module call around the norm: as that call's input, or as the output of a module inside it.
So when activation checkpointing recomputes a layer, the hooks take x again, from the recomputation.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.folding import whole
from ..errors import AdminError
from .batch import argument_names
from .channel_flow import ARGUMENT, UNSEEN, Handover, Value
from .trace import ADDS, IN_PLACE, TIMES, Trace

FACTORS = frozenset(["add with alpha", "sub", "__sub__"])
"""Sums with a factor at the second term, which is the branch or the shortcut."""
GOES_ON = "reads a sum that goes on, as in Pre-LN"
UNRELATED = "reads a sum of which no term depends on the other"
FACTORED = "reads a sum with a factor at the shortcut, as DeepNorm's"
NO_SOURCE = (
    "reads a sum that is written over its shortcut (x += f(x); write x = x + f(x)), or whose shortcut no module is "
    "given or returns (pass it through an nn.Identity)"
)
KEEP = '; unfoldable="keep" trains it with an omega that could not be folded away'
SKIP = 'Give unfoldable="skip" to leave such norms out, or name those that are to have one: sites=[...].'


class Site:
    """A sum x + f(x) and its norm; `capture` and `scale` are hooks.

    Args:
        graph: a forward of the model.
        norm: the norm's output in it.
        x: the shortcut.
    """

    def __init__(self, graph: Trace, norm: Value, x: Value) -> None:
        model, writer = graph.model, writer_of(norm, x)
        self.name = norm.call.module
        """The norm's name in the model."""
        self.norm: Any = model.get_submodule(self.name)
        self.calls = graph.calls[self.name]
        """The number of calls of the norm in a forward."""
        self.axis = norm.channels[norm]
        """The axis of the channels in the norm's argument, from the end."""
        self.order = norm.reads[0].order
        """The axes of the sum in the order in which the norm reads them; () if it reads the sum as it is."""
        self.sources = [(model.get_submodule(place.call.module), place.argument) for place in places(graph, norm, x)]
        """The modules that are given x, each with the name of the argument, or that return x ("")."""
        self.unfoldable = why_unfoldable(graph, norm, x) or ("" if self.sources else NO_SOURCE)
        """Why the fold cannot take ω away; "" if it can."""
        self.learned = bool(writer)
        """Whether ω may move. If no norm wrote x, as in the first site of a stack, ω stays 1."""
        self.written = {value.call.module: way for way, value in writer.written} if writer else {}
        """How the parameters of the norm that wrote x scale x, by name in the model."""
        self.readers = {value.call.module: way for way, value in writer.readings if way} if writer else {}
        """How parameters read x, by name in the model."""
        self.inputs = {value.call.module for value in x.ancestors() if value.made_by == ARGUMENT}
        """The arguments of the model's forward on which x depends."""
        self.shortcuts: dict[torch.device, Tensor] = {}
        """x, between the calls of a source and of the norm; by device, because DataParallel runs a thread on each."""

    @property
    def omega(self) -> Tensor:
        """ω. Shape (C,)."""
        return torch.add(self.norm.omega_init, whole(self.norm.omega_delta)).detach()

    def set_omega(self, omega: Tensor | float) -> None:
        """Set every entry of omega_init to one number. If ω has to stay 1, do nothing."""
        if self.learned:
            self.norm.omega_init.fill_(omega)

    def __getstate__(self) -> dict[str, Any]:
        """Leave x out when a site is copied or saved, because x holds the graph of a forward."""
        return {**vars(self), "shortcuts": {}}

    def shortcut(self, total: Tensor) -> Tensor:
        """The x of a sum, in the shape in which the norm reads the sum.

        Raises:
            AdminError: no source ran.
        """
        if total.device not in self.shortcuts:
            raise AdminError(
                f"{self.name} ran without the module that has its shortcut. Replace no norm after attach; put the "
                "whole layer into a checkpoint, not the norm alone; multiply a branch by 0 rather than leave it out."
            )
        x = self.shortcuts[total.device]
        shape = [total.shape[self.order.index(axis)] for axis in range(len(self.order))] or total.shape
        x = x.reshape(shape) if x.numel() == total.numel() else x.expand(shape)
        return x.permute(self.order) if self.order else x

    def hooks(self) -> Iterable[Any]:
        """Register the hooks. Yields their handles."""
        for source, argument in self.sources:
            register = source.register_forward_pre_hook if argument else source.register_forward_hook
            yield register(partial(self.capture, argument_names(source), argument), with_kwargs=True)
        yield self.norm.register_forward_pre_hook(self.scale)

    def capture(self, names: list[str], argument: str, module: Any, args: tuple, kwargs: dict, x: Any = None) -> None:
        """Keep x: a hook of a module that is given x as an argument, by position or by keyword, or returns x."""
        if argument:
            x = {**dict(zip(names, args)), **kwargs}[argument]
        self.shortcuts[x.device] = x

    def scale(self, norm: Any, args: tuple) -> tuple:
        """Add (ω - 1) ⊙ x to the sum x + f(x): a hook of the norm that reads it."""
        # The sum may have another type than x, as under autocast, and keeps its type.
        total = args[0]
        x = self.shortcut(total)
        del self.shortcuts[total.device]
        omega = (norm.omega_init - 1 + norm.omega_delta).to(x.dtype)
        return total + (x * omega.reshape(-1, *[1] * (-1 - self.axis))).to(total.dtype), *args[1:]


def sums_of(norm: Value) -> list[Value]:
    """The sum that a norm reads, perhaps through one more call, and the sums that only this sum reads."""
    sums = [norm.reads[0]]
    if sums[0].made_by not in ADDS | FACTORS and len(sums[0].reads) == 1:  # axes in another order, or dropout
        sums = sums[0].reads[:]
    for total in sums:  # grows: a term may be a sum, too
        sums += [t for t in total.reads[:2] if t.made_by in ADDS and t.readers == 1 and len(t.reads) > 1]
    return sums


def shortcut_of(norm: Value) -> tuple[Value, str] | None:
    """The shortcut of the sum that a norm reads, and the reason why the norm is no site ("" if it may be a site).

    None: the norm reads no sum.
    """
    (total, *inner), argument = sums_of(norm), norm.reads[0]
    if total.made_by not in ADDS | FACTORS or len(total.reads) < 2 or total.size != norm.size:
        return None
    terms = sorted((t for part in (total, *inner) for t in part.reads[:2] if t not in inner), key=lambda t: t.time)
    others = {x: set().union(*(term.ancestors() for term in terms if term is not x)) for x in terms}
    x = next((term for term in terms if term in others[term]), terms[0])
    if max(total.readers, argument.readers) > 1:
        return x, GOES_ON
    if terms.count(x) > 1 or total.made_by in FACTORS and total.reads[0] is not x:
        return x, FACTORED
    if x in others[x] or reads_unseen(total, x):
        return x, "" if argument is total or argument.order else f"reads {argument.made_by} of a sum, not the sum"
    scaled = [term for term in terms if term.made_by in TIMES and others[term] & {*term.reads, *term.channels}]
    return x, FACTORED if scaled else UNRELATED


def reads_unseen(total: Value, x: Value) -> bool:
    """Whether a sum depends on numbers that the trace cannot see, except through its shortcut."""
    return any(value.made_by == UNSEEN for value in total.ancestors() - x.ancestors())


def writer_of(norm: Value, x: Value) -> Value | None:
    """The norm that wrote the shortcut x of another norm. None if x is only a part of its output, as in Funnel."""
    axis, order = norm.channels[norm], norm.reads[0].order
    axis = order[axis] - len(order) if order else axis
    return next((writer for writer in x.channels if x.channels[writer] == axis and writer.size == x.size), None)


def places(graph: Trace, norm: Value, x: Value) -> list[Handover]:
    """The places where hooks take x: the input of the smallest module call around a norm, and one place inside it.

    The place inside is needed because transformers' layers checkpoint their forward but not their own hooks.
    """
    if any(total.made_by in IN_PLACE and total.reads[0] is x for total in sums_of(norm)):
        return []
    # The hook of a module with more calls than the norm, or of the norm itself, would keep the x of another call.
    name, calls = norm.call.module, graph.calls
    alike = [place for place in x.handovers if calls[place.call.module] == calls[name] and place.call.module != name]
    for call in norm.call.around:
        inputs = [place for place in alike if place.call is call]
        inside = [place for place in alike if call in place.call.around]
        if inputs or inside:
            return inputs[:1] + inside[:1]
    return []


def why_unfoldable(graph: Trace, norm: Value, x: Value) -> str:
    """Why the ω of a shortcut cannot be folded away; "" if it can."""
    writer, name = writer_of(norm, x), norm.call.module
    if not writer:
        return ""
    if graph.calls[name] > 1:
        return f"is called {graph.calls[name]} times"
    if reads_unseen(norm.reads[0], x):
        return "reads what the trace cannot see (a scripted function, a custom autograd function?)"
    ways = [*writer.written, *writer.readings]
    for way, value in ways:
        if way is None and value not in sums_of(norm):
            return f"has a shortcut that is also read by {place_of(graph.model, value)}"
        if way and [other for other, scaled in ways if scaled is value] != [way] * value.readers:
            return f"would be folded into {value.call.module}, which is used elsewhere too"
    return ""


def place_of(model: nn.Module, value: Value) -> str:
    """The function that made a value, its module, the module's class, and the line of code."""
    kind = type(model.get_submodule(value.call.module)).__name__  # with weight_norm, ParametrizedLinear
    return f"{value.made_by} in {value.call.module or 'the model'}, a {kind}{value.line}"


def find_sites(
    model: nn.Module, batch: Any, chosen: Iterable[str] | None, unfoldable: str
) -> tuple[list[list[Site]], dict[str, str]]:
    """The sites of each stack of a model, in forward order, and the norms at which Admin is off, and why.

    The shortcut of a site may depend on the norms of earlier sites. If the last of these sites ends a stack, the new
    site continues that stack. Otherwise it begins a stack.

    Args:
        model: the model.
        batch: the arguments of a forward (see `batch`).
        chosen: the names of the norms to make sites. None: every norm that can be a site.
        unfoldable: if the ω of a site cannot be folded away, "refuse" the model, "keep" ω, or "skip" the site.

    Raises:
        AdminError: the model has no site; a chosen norm is no site; a site cannot have ω, or its ω cannot be folded.
    """
    graph = Trace(model, batch)
    kind = type(model).__name__
    shortcuts = {name: shortcut for name, norm in graph.norms.items() if (shortcut := shortcut_of(norm))}
    off = graph.strangers | {name: why for name, (_, why) in shortcuts.items() if why}
    if chosen is None:
        # If no norm wrote a norm's shortcut, the norm starts a stack if its layer is of the class of other sites'
        # layers. Otherwise it is no site (embeddings).
        layers = {name: type(model.get_submodule(name.rpartition(".")[0])) for name in shortcuts if name not in off}
        inside = {layer for name, layer in layers.items() if shortcuts[name][0].channels}
        chosen = [name for name, layer in layers.items() if layer in inside]
        off |= {name: "reads a sum whose shortcut no norm wrote" for name in layers if name not in chosen}
    elif wrong := [name for name in chosen if name not in shortcuts or name in off]:
        raise AdminError(f"{wrong[0]} {off.get(wrong[0], 'is not a norm that alone reads a sum x + f(x)')}.")
    stacks: list[list[Site]] = []
    sites: dict[Value, Site] = {}
    for norm in sorted((graph.norms[name] for name in chosen), key=lambda norm: norm.time):
        x, _ = shortcuts[norm.call.module]
        site, before = Site(graph, norm, x), x.ancestors()
        if site.unfoldable and not (unfoldable == "keep" and site.sources):
            if unfoldable == "refuse":
                raise AdminError(f"{kind}: {site.name} {site.unfoldable}{KEEP if site.sources else ''}. {SKIP}")
            off[site.name] = site.unfoldable
            continue
        # Continue the stack that ends with the last site on which x depends, or begin a stack.
        earlier = [other for written, other in sites.items() if written in before]
        stack = next((stack for stack in stacks if stack[-1:] == earlier[-1:]), [])
        if not stack:
            stacks.append(stack)
        elif not site.learned and unfoldable == "keep":
            site.learned, site.unfoldable = True, "has a shortcut that no norm wrote as it is"
        elif not site.learned:
            off[site.name] = "keeps omega 1: no norm wrote its shortcut as it is"
        stack.append(site)
        sites[norm] = site
    if not stacks:
        why = grouped(off) or "It has no norm that reads a sum"
        raise AdminError(f"{kind}: no site, a norm that alone reads a sum x + f(x). {why}. Admin is for Post-LN.")
    alone = [stack[0].name for stack in stacks if depth(stack) == 1]
    kinds = {type(site.norm) for stack in stacks for site in stack}
    idle = [name for module, name in graph.names.items() if type(module) in kinds and not graph.calls[name]]
    off |= dict.fromkeys(idle, "does not run on this batch")
    return stacks, off | dict.fromkeys(alone, "is alone in its stack, so omega is 1")


def depth(stack: list[Site]) -> int:
    """The number of sub-layers of a stack that run in a forward."""
    return sum(site.calls for site in stack)


def grouped(reasons: dict[str, str]) -> str:
    """Join reasons into one text. Each reason follows the first name to which it applies, and two like it."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name or "the model")
    groups = []
    for reason, (first, *others) in names.items():
        alike = others if len(others) < 3 else [*others[:2], f"{len(others) - 2} more"]
        groups.append(f"{first}, like {' and '.join(alike)}, {reason}" if others else f"{first} {reason}")
    return "; ".join(groups)
