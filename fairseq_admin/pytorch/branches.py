"""The sub-layers of a Post-LN model, and where their branches can be divided.

Since a norm forgets the scale of what it reads, LN(ω x + f) = LN(x + f/ω). A sub-layer is a sum of which one term, the
branch f, depends on another, and that only a norm reads. The branch is divided at the outermost module that returns it,
or, if no module does, at the weights that write it. It can be folded if it is proportional to weights that nothing else
reads.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import ne
from typing import Any

import torch

from .sums import Sum, is_norm, is_summed, may_add, norms_of, origin
from .trace import PARAMETER, Graph, Value

GOES_ON = "reads a sum that goes on, as in Pre-LN"
UNRELATED = "reads a sum of which no term depends on the other"
FACTORED = "reads a sum with a factor at the shortcut, as DeepNorm's"
NO_NORM = "reads a sum whose shortcut no norm wrote"
NOWHERE = ", and no module returns it"


class Refused(Exception):
    """A value that is not proportional to weights, or that cannot be divided."""


@dataclass(eq=False)
class Sublayer:
    """A sum x + f(x) and its norm, in one forward."""

    total: Value
    norm: Value
    """What the norm wrote."""
    branches: list[Value]
    shortcut: set[Value]

    @property
    def name(self) -> str:
        """The name of the module that normalises."""
        return self.norm.place[-1]


@dataclass(eq=False)
class Writer:
    """Where branches are divided by ω, and what the fold divides."""

    name: str
    """The name of a module that returns branches, or of a parameter that writes them."""
    place: int | None
    """The place of the branch in the leaves of what the module returns. None: a parameter."""
    outer: tuple[str, int] | None = None
    """Name and place of the outermost module that returns the branch. It need not hold the weights, as a dropout."""
    weights: dict[str, None] = field(default_factory=dict)
    """The names of the parameters that the fold divides."""
    unfoldable: str = ""
    """Why the fold cannot take ω away; "" if it can."""
    sublayers: list[Sublayer] = field(default_factory=list)


def ways(value: Value) -> Iterator[list[Value]]:
    """The sets of values that depend on weights and that, scaled together, scale a value."""
    for way in value.sets:
        live = [part for part in way if part.live]
        if live and all(part.live or part.zero for part in way):
            yield live


def weights_of(value: Value, path: set[Value]) -> list[Value]:
    """The parameters to which a value is proportional. Adds the values in between to `path`.

    Raises:
        Refused: there are none.
    """
    path.add(value)
    if value.made_by == PARAMETER:
        return [value]
    failure = Refused(value)
    for number, way in enumerate(ways(value)):
        tried = set[Value]()
        try:
            weights = [weight for part in way for weight in weights_of(part, tried)]
        except Refused as refused:
            failure = failure if number else refused
        else:
            path |= tried
            return weights
    raise failure


class Search:
    """The sub-layers of a model and their writers.

    Args:
        graph: a forward of the model.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.off: dict[str, str] = {}
        """The norms that read a sum and get no ω, and why."""
        self.quiet: set[str] = set()
        """Those of them that should get none."""
        sums: dict[Value, tuple[Value, list[Value]]] = {}
        for value in graph.values:
            norms, others = norms_of(value) if may_add(value) else ([], [])
            if norms and is_summed(value):
                for norm in norms:
                    norm.norm_of = norm.norm_of or value
                sums.setdefault(norms[0], (value, others))  # u, not the u - mean(u) of the norm itself
        found = [found for norm, (total, others) in sums.items() if (found := self.sublayer(total, norm, others))]
        # Where no norm wrote the shortcut, the sum is the first of a stack if its layer is of the class of other sums'
        # layers. Otherwise it is none, as in embeddings.
        inside = {self.layer(sublayer) for sublayer in found if any(is_norm(origin(x)) for x in sublayer.shortcut)}
        self.sublayers = [sublayer for sublayer in found if self.layer(sublayer) in inside]
        for sublayer in found:
            if sublayer not in self.sublayers:
                self.leave_out(sublayer.norm, NO_NORM, quiet=True)

    def layer(self, sublayer: Sublayer) -> type:
        return self.graph.classes[sublayer.total.place[-1]]

    def leave_out(self, norm: Value, why: str, quiet: bool = False) -> None:
        self.off[norm.place[-1]] = why
        self.quiet |= {norm.place[-1]} if quiet else set()

    def sublayer(self, total: Value, norm: Value, others: list[Value]) -> Sublayer | None:
        """The sub-layer of a sum that a norm reads; None if it is none."""
        found = Sum(total)
        normed = any(is_norm(origin(term)) for term in found.terms)
        found.passed |= found.branches & self.graph.outputs
        if not normed and not found.branches and not found.passed:  # embeddings
            return None
        if others or found.passed:
            self.leave_out(norm, GOES_ON, quiet=bool(others))
        elif not found.branches:
            self.leave_out(norm, UNRELATED)
        elif found.is_factored():
            self.leave_out(norm, FACTORED)
        else:
            return Sublayer(total, norm, found.roots(total), found.shortcut)
        return None

    def idle(self) -> dict[str, str]:
        """Norms of the sub-layers' classes that did not run."""
        kinds = {self.graph.classes[sublayer.name] for sublayer in self.sublayers if sublayer.name}
        names = [name for name, kind in self.graph.classes.items() if kind in kinds and not self.graph.returned[name]]
        return dict.fromkeys(names, "does not run on this batch")

    def described(self, value: Value) -> str:
        """The call that made a value, its module, that module's class, and the line of code; a parameter's name."""
        if value.made_by == PARAMETER:
            return value.place[0]
        name = value.place[-1]
        return f"{value.made_by} in {name or 'the model'}, a {self.graph.classes[name].__name__}{value.line}"

    def writers(self) -> list[Writer]:
        """Where the branches of all sub-layers are divided. Its place is -1 if a branch cannot be divided anywhere."""
        writers: dict[tuple[str, int | None], Writer] = {}
        plans = []
        for sublayer, root in [(s, root) for s in self.sublayers for root in s.branches]:
            path, reason = set[Value](), ""
            try:
                weights_of(root, path)
            except Refused as refused:
                reason = f"has a branch that is not proportional to weights: {self.described(*refused.args)}"
            plans.append((sublayer, root, path, reason))
        everything = {value for _, root, path, _ in plans for value in {root, *path}}
        for sublayer, root, path, reason in plans:
            reason = reason or self.unread(root, path)
            for value in path - {root} if not reason else ():
                if stranger := next((reader for reader in value.readers if reader not in everything), None):
                    also = f"which is also read by {self.described(stranger)}"
                    reason = f"has a branch made of {self.described(value)}, {also}"
            try:
                cuts = self.cuts(root, everything, not reason)
            except Refused:
                tied = [
                    " and ".join(weight.place) for weight in path if weight.made_by == PARAMETER and weight.place[1:]
                ]
                reason = reason or f"has a branch made of {tied[0]}, which are one weight"
                cuts, reason = [(sublayer.name, -1, root, None)], reason + NOWHERE
            for name, place, value, outer in cuts:
                writer = writers.setdefault((name, place), Writer(name, place, outer))
                writer.sublayers.append(sublayer)
                writer.unfoldable = writer.unfoldable or reason
                writer.weights |= {} if reason else {weight.place[0]: None for weight in weights_of(value, set())}
        return list(writers.values())

    def unread(self, root: Value, path: set[Value]) -> str:
        """Why the module that returns a branch may also write it with weights that this forward does not read.

        An expert without a token has them: weights like those of another one, under a name that differs in one part.
        """
        weights = [(weight.place[0].split("."), weight.shape) for weight in path if weight.made_by == PARAMETER]
        for module in [name for name, *_ in root.returned]:
            for name, value in self.graph.parameters.items():
                parts = name.split(".") if name.startswith(f"{module}.") and not value.readers else []
                alike = (parts and len(parts) == len(other) and shape == value.shape for other, shape in weights)
                if any(fits and sum(map(ne, parts, other)) == 1 for fits, (other, _) in zip(alike, weights)):
                    return f"has a branch in {module}, where this batch does not run {name}"
        return ""

    def modules(self, value: Value, branches: set[Value]) -> Iterator[tuple[str, int]]:
        """The modules, outermost first, that return a value, and only branches in its place; and that place."""
        for name, place, time in reversed(value.returned):
            # A layer may also return what was read inside it. Scripted modules take no hooks.
            late = any(reader.time < time for reader in value.readers)
            scripted = issubclass(self.graph.classes[name], torch.jit.ScriptModule)
            if not late and not scripted and all(call.get(place) in branches for call in self.graph.returned[name]):
                yield name, place

    def cuts(self, value: Value, branches: set[Value], foldable: bool, outer: Any = None) -> list[Any]:
        """Where a branch is divided: name and place as in `Writer`, the value that is divided, and `Writer.outer`.

        Args:
            value: the branch, or a value on the way from its weights to it.
            branches: all branches, and all values on the way to them.
            foldable: whether the branch is proportional to weights. Then the module has to hold these.

        Raises:
            Refused: no module returns it, and it is not foldable, or made of a tied weight.
        """
        weights = weights_of(value, set()) if foldable else []
        for name, place in self.modules(value, branches):
            outer = outer or (name, place)
            if all(any(held.startswith(f"{name}.") for held in weight.place) for weight in weights):
                return [(name, place, value, outer)]
        if value.made_by == PARAMETER and foldable and len(value.place) == 1:
            return [(value.place[0], None, value, outer)]
        for way in ways(value):
            if not foldable and any({*part.readers} != {value} for part in way):
                continue
            with contextlib.suppress(Refused):
                return [cut for part in way for cut in self.cuts(part, branches, foldable, outer)]
        raise Refused(value)


def stacks_of(sublayers: list[Sublayer]) -> list[list[Sublayer]]:
    """The sub-layers of each stack, in forward order.

    A sub-layer continues the stack whose last norm wrote its shortcut, or else that of the last norm on which its
    shortcut depends. Where that norm is not the last of its stack, the sub-layer begins a stack.
    """
    stacks: list[list[Sublayer]] = []
    earlier: list[Sublayer] = []  # the latest first
    for sublayer in sorted(sublayers, key=lambda sublayer: sublayer.norm.time):
        totals = {origin(x).norm_of for x in sublayer.shortcut}
        before = next((other for other in earlier if other.total in totals), None) or next(
            (other for other in earlier if any(x.depends_on({other.norm}) for x in sublayer.shortcut)), None
        )
        stack = next((stack for stack in stacks if stack[-1] is before), [])
        stacks += [] if stack else [stack]
        stack.append(sublayer)
        earlier.insert(0, sublayer)
    return stacks


def grouped(reasons: dict[str, str]) -> str:
    """Join reasons into one text. Those that differ in numbers follow the first name, and two like it."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(re.sub(r"\d+", "", reason), [reason]).append(name or "the model")
    groups = []
    for reason, first, *others in names.values():
        alike = others if len(others) < 3 else [*others[:2], f"{len(others) - 2} more"]
        groups.append(f"{first}, like {' and '.join(alike)}, {reason}" if others else f"{first} {reason}")
    return "; ".join(groups)
