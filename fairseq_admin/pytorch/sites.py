"""Where Admin acts in a model: its sites, found in the graph of one forward.

A site is a sum x + f(x) that nothing but a norm reads, as Post-LN has (in Pre-LN the sum goes on). x is its shortcut:
the term on which the others depend. With each site the graph gives what the fold needs: the norm that wrote x, and the
weights that read x, all of which have to undo a scale that only the shortcut is to have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..errors import AdminError
from .reading import CASTS, ELEMENTWISE, MOVES, Reader, read_by, readings, through, weights_of
from .trace import Call, Taking, Trace, Value, tensors

ADDS = frozenset("add add_ __add__ __radd__ __iadd__".split())


@dataclass(frozen=True)
class Site:
    """A sum x + f(x) and its norm, by the names of modules and parameters."""

    norm: str
    taking: Taking
    """The last module before the sum that is given x."""
    writer: str | None
    """The norm that wrote x. None: the first of a stack, whose input no norm wrote; its ω stays 1."""
    readers: tuple[Reader, ...]
    inputs: frozenset[str]
    """Of the first site of a stack: the arguments of the model's forward on which x depends."""


def terms(total: Value, reader: Call) -> list[tuple[Value, Call]]:
    """What a value that one call reads is the sum of, each term with the call that adds it; if it is none, the value.

    A sum is of two tensors of its own shape, or of such sums that nothing else reads.
    """
    call = total.maker
    pair = [] if call is None else list(tensors(call.args))
    sums = call is not None and call.name in ADDS and not call.kwargs and list(read_by(total)) == [reader]
    if call is None or not sums or [value.shape for value in pair] != 2 * [total.shape]:
        return [(total, reader)]
    return [part for term in pair for part in terms(term, call)]


def ancestors(value: Value, since: int) -> Iterator[Value]:
    """All on which a value depends, itself too, as far back as the call numbered `since`."""
    seen, stack = {value}, [value]
    while stack:
        value = stack.pop()
        yield value
        if value.maker is not None and value.maker.time > since:
            new = set(value.maker.reads) - seen
            seen |= new
            stack += new


def shortcut_of(parts: list[tuple[Value, Call]]) -> tuple[Value, Call] | None:
    """The term of a sum on which all others depend."""
    for x, call in parts:
        others = [part for part, _ in parts if part is not x]
        born = -1 if x.maker is None else x.maker.time
        if others and all(x in ancestors(part, born) for part in others):
            return x, call
    return None


def writer_of(x: Value) -> str | None:
    """The norm that wrote a shortcut."""
    maker = through(x, ELEMENTWISE | MOVES).maker
    return maker.module if maker is not None and maker.name == "norm" else None


def unseen(x: Value) -> bool:
    """Whether a value depends on what no call that was seen has made."""
    return any(value.kind == "unknown" for value in ancestors(x, -1))


def places(name: str) -> set[str]:
    """Where a norm is: its layer, which is its name up to the last number, and its place in any layer."""
    return {"".join(re.findall(r"^(?:.*\.)?\d+(?=\.)", name)), re.sub(r"\d+", "*", name)}


class Finder:
    """Finds the sites of a trace, and notes in words why others are none."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.refused: list[str] = []
        self.sums: dict[str, tuple[Value, Call]] = {}
        """The shortcut of each norm that reads a sum alone, and the call that adds it."""
        norms = [call for call in trace.calls if call.name == "norm"]
        self.norms = len(norms)
        for norm in norms:
            parts = terms(through(norm.args[0], CASTS), norm)
            shortcut = shortcut_of(parts)
            if shortcut is not None:
                self.sums[norm.module] = shortcut
            elif len(parts) > 1 and any(writer_of(x) for x, _ in parts) and any(unseen(x) for x, _ in parts):
                self.refused.append(f"{norm.module} reads what the trace cannot see (a custom autograd function?)")

    def sites(self, chosen: Mapping[str, str] | None) -> list[Site]:
        """The sites, in forward order; in `refused`, why others cannot be one.

        Args:
            chosen: the norms that are to be sites, and the module that takes the shortcut of each. None: all that are.
        """
        if chosen is None:
            # A sum whose shortcut no norm wrote is the first of a stack, where others are, or no site (embeddings).
            written = {place for name, (x, _) in self.sums.items() if writer_of(x) for place in places(name)}
            names = [name for name, (x, _) in self.sums.items() if writer_of(x) or places(name) & written]
        else:
            names = [name for name in self.sums if name in chosen]
            self.refused += [f"{name} reads no sum x + f(x) alone" for name in chosen if name not in self.sums]
        sites = []
        for name in names:
            try:
                sites.append(self.site(name, (chosen or {}).get(name)))
            except AdminError as error:
                self.refused.append(str(error))
        return sites

    def site(self, name: str, module: str | None) -> Site:
        """The site of a norm that reads a sum.

        Args:
            module: the one that takes the shortcut. None: the last that does.

        Raises:
            AdminError: the hooks could not scale its shortcut, or the fold not undo it.
        """
        x, add = self.sums[name]
        writer, calls = writer_of(x), self.trace.entered
        for norm in filter(None, (name, writer)):
            if calls[norm] > 1:
                raise AdminError(f"{norm} is called {calls[norm]} times")
        takings = [t for t in x.takers if t.time <= add.time and calls[t.module] == 1 and module in (None, t.module)]
        if not takings:
            given = f"{module} is not" if module else "no module that is called once is"
            raise AdminError(f"{given} given the shortcut of {name}")
        readers = () if writer is None else tuple(self.readers(name, x, add))
        stream = () if writer in self.sums else ancestors(x, -1)
        inputs = frozenset(value.name for value in stream if value.kind == "argument")
        return Site(name, takings[-1], writer, readers, inputs)

    def readers(self, name: str, x: Value, add: Call) -> list[Reader]:
        """The weights that read the shortcut of a norm.

        Raises:
            AdminError: something else reads it, or the weights read something else.
        """
        source = through(x, ELEMENTWISE | MOVES)
        readers: list[Reader] = []
        calls: dict[Value, set[Call]] = {}
        for reading in readings(source):
            if reading.call is add and reading.value is x and reading.axis == -1:
                continue
            pairs = weights_of(reading)
            if not pairs:
                place = reading.call.module or "the model"
                raise AdminError(f"the shortcut of {name} is also read by {reading.call.name} in {place}")
            for weight, reader in pairs:
                calls.setdefault(weight, set()).add(reading.call)
                readers.append(reader)
        for weight, known in calls.items():
            if others := set(read_by(weight)) - known:
                place = next(iter(others)).module or "the model"
                raise AdminError(f"{weight.name} reads the shortcut of {name}, and something else in {place}")
        return list(dict.fromkeys(readers))
