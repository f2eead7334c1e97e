"""The sites of a model, found in the graph of one forward, and the hooks that scale their shortcuts.

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
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AdminError
from .channel_flow import ARGUMENT, UNSEEN, Handover, Scaling, Value
from .folding import whole
from .trace import ADDS, IN_PLACE, TIMES, Trace

FACTOR = "add with alpha"
"""A sum with a factor at its second term, which may be the branch."""
GOES_ON = "reads a sum that goes on, as in Pre-LN"
UNRELATED = "reads a sum of which no term depends on the other"
FACTORED = "reads a sum with a factor at the shortcut, as DeepNorm's"
KEEP = 'unfoldable="keep" trains it with an omega that could not be folded away'
SKIP = 'Give unfoldable="skip" to leave such norms out, or name those that are to have one: sites=[...].'


def position_and_keyword(module: nn.Module, argument: int | str) -> tuple[int, str]:
    """Both names of a module's argument, of which one is known. Without a name it has a keyword that nobody gives."""
    names = list(inspect.signature(module.forward).parameters)
    if isinstance(argument, int):
        return argument, names[argument] if argument < len(names) else ""
    return names.index(argument) if argument in names else len(names), argument


@dataclass(eq=False)
class Site:
    """A sum x + f(x) and its norm; `capture`, `capture_result` and `scale` are hooks."""

    name: str
    """The norm's name in the model."""
    norm: Any
    calls: int
    """How often the norm is called in a forward."""
    axis: int
    """The axis of the channels in the sum, from the end."""
    sources: list[tuple[nn.Module, int | str | None]]
    """The modules that are given x, as their argument of this position or keyword, or return it (None)."""
    learned: bool
    """Whether ω may move. Not in the first of a stack, whose input no norm wrote: its ω stays 1."""
    unfoldable: str
    """Why the fold cannot take ω away; "" if it can."""
    written: dict[str, Scaling]
    """How the parameters of the norm that wrote x scale it, by name in the model."""
    readers: dict[str, Scaling]
    """How parameters read x, by name in the model."""
    inputs: set[str]
    """The arguments of the model's forward on which x depends."""
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
        """All but x, which has the graph of the forward, can be copied and saved."""
        return {**vars(self), "shortcuts": {}}

    def shortcut(self, total: Tensor) -> Tensor:
        """The x of a sum, in the sum's shape; or AdminError."""
        if total.device not in self.shortcuts:
            raise AdminError(
                f"{self.name} ran without the module that has its shortcut: is the norm alone in a checkpoint? Put the "
                "whole layer into the checkpoint. Is the branch left out at random? Multiply it by 0 instead."
            )
        x = self.shortcuts[total.device]
        return x.reshape(total.shape) if x.numel() == total.numel() else x.expand_as(total)

    def hooks(self) -> Iterable[Any]:
        """Hang the hooks. Yields their handles."""
        for source, argument in self.sources:
            if argument is None:
                yield source.register_forward_hook(self.capture_result)
            else:
                hook = partial(self.capture, *position_and_keyword(source, argument))
                yield source.register_forward_pre_hook(hook, with_kwargs=True)
        yield self.norm.register_forward_pre_hook(self.scale)

    def capture(self, position: int, name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Remember x: a hook of a module that is given it, by position or by keyword."""
        x = args[position] if position < len(args) else kwargs[name]
        self.shortcuts[x.device] = x

    def capture_result(self, module: nn.Module, args: tuple, x: Tensor) -> None:
        """Remember x: a hook of the module that returns it."""
        self.shortcuts[x.device] = x

    def scale(self, norm: Any, args: tuple) -> tuple:
        """Add (ω - 1) ⊙ x to the sum x + f(x): a hook of the norm that reads it."""
        # The sum may be of another type than x, as under autocast, and is to stay so.
        total = args[0]
        x = self.shortcut(total)
        del self.shortcuts[total.device]
        omega = (norm.omega_init - 1 + norm.omega_delta).to(x.dtype)
        return total + (x * omega.reshape(-1, *[1] * (-1 - self.axis))).to(total.dtype), *args[1:]


def sum_of(norm: Value) -> tuple[Value, Value, str] | None:
    """The sum that a norm reads, its shortcut, and why it is no site ("" if it may be one). None: it reads no sum."""
    total = norm.reads[0]
    if total.made_by not in ADDS | {FACTOR} or len(total.reads) < 2:
        return None
    x, f = sorted(total.reads[:2], key=lambda value: value.time)
    before = f.ancestors()
    if total.readers > 1:
        return total, x, GOES_ON
    if total.made_by == FACTOR and total.reads[0] is not x:
        return total, x, FACTORED
    if x in before or reads_unseen(f, x):
        return total, x, ""
    if x.made_by in TIMES and before.intersection(x.reads) or f.made_by in TIMES and x.ancestors() & {*f.reads}:
        return total, x, FACTORED
    return total, x, UNRELATED


def reads_unseen(f: Value, x: Value) -> bool:
    """Whether a branch depends on what the trace cannot see, other than through its shortcut."""
    return any(value.made_by == UNSEEN for value in f.ancestors() - x.ancestors())


def writer_of(norm: Value, x: Value) -> Value | None:
    """The norm that wrote all of the shortcut of another; not one that wrote more, as where Funnel pools positions."""
    axis = norm.channels[norm]
    return next((writer for writer in x.channels if x.channels[writer] == axis and writer.size == x.size), None)


def handovers_of(graph: Trace, norm: Value, total: Value, x: Value) -> list[Handover]:
    """Where to take x: in the smallest module call around a norm, as that call's input, and once inside it.

    Inside it as well, for transformers' layers put their forward into a checkpoint without their hooks.
    """
    # A module that is called more often than the norm would leave another x.
    usable = [
        handover
        for handover in x.handovers
        if handover.time < total.time and handover.call.module != norm.call.module
        if graph.calls[handover.call.module] == graph.calls[norm.call.module]
    ]
    for call in norm.call.around():
        inputs = [handover for handover in usable if handover.call is call]
        inside = [handover for handover in usable if call in handover.call.around()]
        returned = [handover for handover in inside if handover.argument is None]
        if inputs or inside:
            return inputs[-1:] + (returned or inside)[-1:]
    return []


def why_unfoldable(graph: Trace, norm: Value, total: Value, x: Value) -> str:
    """Why a shortcut's ω could not be folded away; "" if it could."""
    writer, name = writer_of(norm, x), norm.call.module
    if graph.calls[name] > 1:
        return f"is called {graph.calls[name]} times"
    if reads_unseen(total, x):
        return "reads what the trace cannot see (a custom autograd function?)"
    if not writer:
        return ""
    module = graph.model.get_submodule(writer.call.module)
    uses = max(graph.value(parameter).readers for parameter in module.parameters())
    if uses > 1:
        return f"has its shortcut from {writer.call.module}, whose parameters are used {uses} times in a forward"
    for reader, value in writer.readings:
        if reader is None and value is not total:
            return f"has a shortcut that is also read by {place_of(graph.model, value)}"
        if reader and [other for other, read in writer.readings if read is value] != [reader] * value.readers:
            return f"has a shortcut that {value.call.module} reads, with something else"
    return ""


def place_of(model: nn.Module, value: Value) -> str:
    """The function that made a value, its module, what the module's weight is computed by, and the line of code."""
    module = model.get_submodule(value.call.module)
    parametrizations = getattr(module, "parametrizations", {}).values()
    kinds = [type(part).__name__ for part in chain(module._forward_pre_hooks.values(), *parametrizations)]
    weight = f", whose weight is under {' and '.join(kinds)}" if kinds else ""
    return f"{value.made_by} in {value.call.module or type(module).__name__}{weight}{value.line}"


def site_of(graph: Trace, norm: Value, x: Value, cannot_fold: str, handovers: list[Handover]) -> Site:
    """The site at a norm."""
    name, writer, model = norm.call.module, writer_of(norm, x), graph.model
    readings = writer.readings if writer and not cannot_fold else []
    return Site(
        name=name,
        norm=model.get_submodule(name),
        calls=graph.calls[name],
        axis=norm.channels[norm],
        sources=[(model.get_submodule(handover.call.module), handover.argument) for handover in handovers],
        learned=bool(writer or cannot_fold),
        unfoldable=cannot_fold,
        written={f"{writer.call.module}.{key}": way for key, way in writer.written.items()} if writer else {},
        readers={value.call.module: reader for reader, value in readings if reader},
        inputs={value.call.module for value in x.ancestors() if value.made_by == ARGUMENT},
    )


def find_sites(
    model: nn.Module, batch: Any, chosen: Iterable[str] | None, unfoldable: str
) -> tuple[list[list[Site]], dict[str, str]]:
    """The sites of each stack of a model, in forward order, and why other norms that read a sum are no sites.

    A site goes on with the stack of the last site before it on whose norm its shortcut depends.

    Args:
        model: the model.
        batch: what a forward takes (see `batch`).
        chosen: the norms that are to be sites. None: all that are.
        unfoldable: "refuse" the model, "keep" ω, or "skip" the site, where ω could not be folded away.

    Raises:
        AdminError: no site; a chosen norm is none; one cannot have ω, or not be folded.
    """
    graph = Trace(model, batch)
    kind = type(model).__name__
    sums = {name: sum_read for name, norm in graph.norms.items() if (sum_read := sum_of(norm))}
    reasons = {**graph.strangers, **{name: why for name, (_, _, why) in sums.items() if why}}
    if chosen is None:
        # A sum whose shortcut no norm wrote is the first of a stack, in a layer as others are, or no site (embeddings).
        layers = {name: type(model.get_submodule(name.rpartition(".")[0])) for name in sums.keys() - reasons.keys()}
        inside = {layer for name, layer in layers.items() if sums[name][1].channels}
        chosen = [name for name, layer in layers.items() if layer in inside]
        reasons |= dict.fromkeys(layers.keys() - set(chosen), "reads a sum whose shortcut no norm wrote")
    elif wrong := [name for name in chosen if name not in sums or name in reasons]:
        raise AdminError(f"{wrong[0]} {reasons.get(wrong[0], 'is not a norm that alone reads a sum x + f(x)')}.")
    if not chosen:
        why = grouped(reasons) or "It has no norm that reads a sum"
        raise AdminError(f"{kind}: no site, a norm that alone reads a sum x + f(x). {why}. Admin is for Post-LN.")
    stacks: list[list[Site]] = []
    sites: dict[Value, Site] = {}
    for norm in sorted((graph.norms[name] for name in chosen), key=lambda norm: norm.time):
        name, (total, x, _) = norm.call.module, sums[norm.call.module]
        before, handovers = x.ancestors(), handovers_of(graph, norm, total, x)
        earlier = [site for norm, site in sites.items() if norm in before]
        cannot_fold = why_unfoldable(graph, norm, total, x)
        if earlier and unfoldable == "keep" and not writer_of(norm, x):
            cannot_fold = cannot_fold or "has a shortcut that no norm wrote as it is"
        unsuited = ""
        if total.made_by in IN_PLACE and total.reads[0] is x:
            unsuited = "reads a sum that is written over its shortcut (x += f(x); write x = x + f(x))"
        elif not handovers:
            unsuited = "has a shortcut that no module is given or returns; put its layer in a module"
        if unsuited or cannot_fold and unfoldable != "keep":
            reasons[name] = cannot_fold or unsuited
            if unfoldable == "refuse":
                keep = "" if unsuited else f"; {KEEP}"
                raise AdminError(f"{kind}: {name} {reasons[name]}{keep}. {SKIP}")
            continue
        sites[norm] = site_of(graph, norm, x, cannot_fold, handovers)
        # With the sites of a stack, the last of which x depends on; or the first of another.
        stack = next((stack for stack in stacks if stack[-1:] == earlier[-1:]), [])
        if not stack:
            stacks.append(stack)
        stack.append(sites[norm])
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
