"""Sums that norms read, and their terms, in the graph of a forward (see `trace`).

A norm is any code that forgets the scale of what it reads. The terms of a sum are found by walking back through sums,
views and masks: to a value that anything else reads, too, or that is no such thing.
"""

from __future__ import annotations

from .trace import PARAMETER, VIEW, Value


def is_matrix(value: Value) -> bool:
    return value.shape.numel() > max(value.shape, default=1)


def broadcasts(read: Value, made: Value) -> bool:
    sizes = zip(reversed(read.shape), reversed(made.shape))
    return len(read.shape) <= len(made.shape) and all(size in (1, whole) for size, whole in sizes)


def origin(value: Value) -> Value:
    """The value of which this one may be a view, a part, or weighted as by a norm."""
    while not value.norm_of and len(parts := [part for part in value.parts if not part.weight] or [*value.parts]) == 1:
        (value,) = parts
    return value


def is_norm(value: Value) -> bool:
    """Whether one call normalised something to write this value."""
    inputs = value.repeat.inputs if value.repeat else []
    alike = all(broadcasts(read, value) for read in inputs if is_matrix(read))  # not so in a product of matrices
    return bool(value.norm_of) or alike and any(value.degree({read: 1}) == 0 for read in inputs)


def norms_of(total: Value) -> tuple[list[Value], list[Value]]:
    """What norms wrote that read this sum, and what anything else made of it."""
    powers, norms, others = {total: 1}, list[Value](), list[Value]()
    waiting = {*total.readers}
    while waiting:
        waiting.remove(value := min(waiting, key=lambda value: value.time))
        matrices = [read for read in value.repeat.inputs if read.weight and is_matrix(read)] if value.repeat else []
        power = value.degree(powers) if all(broadcasts(read, value) for read in matrices) else None
        if power == 0:
            norms.append(value)
        elif power is None or matrices:
            others.append(value)
        else:
            powers[value] = power
            waiting |= {*value.readers}
    return norms, others


def is_stream(value: Value) -> bool:
    """Whether a value, or the one of which it is a copy or a part, has several readers."""
    while value.uses < 2:
        bases = set()
        for read in value.reads if value.made_by != PARAMETER else ():
            while read.made_by == VIEW and read.uses < 2:
                (read,) = read.reads
            bases |= {read} if read.dtype.is_floating_point else set()
        if len(bases) != 1:
            return False
        (value,) = bases
    return True


def may_add(value: Value) -> bool:
    """Whether a call may have added a value that is also read elsewhere to others, or put them next to each other.

    This spares products of matrices and attention scores the trials.
    """
    inputs = value.repeat.inputs if value.repeat and value.data else []
    if len(inputs) == 1:  # stack((x, f)).sum(0)
        stacked = inputs[0].repeat.inputs if inputs[0].repeat else []
        return len(stacked) > 1 and may_add(inputs[0])
    sizes = [read.shape.numel() for read in inputs]
    fits = sum(sizes) == value.shape.numel() or all(broadcasts(read, value) for read in inputs)
    streams = (is_stream(r) and (r.live or size == max(sizes)) or may_add(r) for r, size in zip(inputs, sizes))
    return fits and any(streams)


def is_summed(value: Value) -> bool:
    """Whether a value is a sum, or is put together from sums and other values."""
    parts = value.parts if may_add(value) or not value.repeat else {}
    return value.adds or len(parts) > 1 and any(is_summed(part) for part in parts if len(part.readers) < 2)


def below(values: set[Value]) -> set[Value]:
    """These values, and those of which they are sums, views or parts."""
    found, new = set[Value](), values
    while new:
        found |= new
        new = {part for value in new for part in value.parts} - found
    return found


class Sum:
    """A value as the sum of its terms. Views and masks of a value count as that value.

    A module's result that depends on another term, as that of an adapter that ends in h + g(h), is one term, unless a
    norm that reads a sum wrote a part of it.
    """

    def __init__(self, total: Value) -> None:
        self.between: set[Value] = set()
        """The sum, and the values between it and its terms."""
        others: dict[Value, set[Value]] = {total: set()}
        waiting = {total}
        while waiting:
            waiting.remove(value := max(waiting, key=lambda value: value.time))
            result = value.returned and value.depends_on(below(others[value]))
            whole = result and not any(part.norm_of for part in below({value}))
            if value is total or value.parts and self.between.issuperset(value.readers) and not whole:
                self.between.add(value)
                waiting |= {*value.parts}
                for part in value.parts:
                    others.setdefault(part, set()).update(others[value], {*value.parts} - {part})
        self.terms = self.factors(total)
        """The terms, each with its factor."""
        related = {term for term in self.terms if term.depends_on({*self.terms} - {term})}
        self.branches = {term for term in related if self.between.issuperset(term.readers)}
        """The terms that depend on others, and that only this sum reads."""
        self.passed = {term for term in related - self.branches if not origin(term).norm_of}
        """Those that other code reads, too, and that are no norm's result."""
        self.shortcut = {*self.terms} - self.branches

    def factors(self, value: Value) -> dict[Value, float]:
        """The terms of a value, each with its factor in it."""
        if value not in self.between:
            return {value: 1.0}
        found: dict[Value, float] = {}
        for part, factor in value.parts.items():
            for term, inner in self.factors(part).items():
                found[term] = factor * inner + (found.get(term, 0.0) if value.adds else 0.0)
        return found

    def roots(self, value: Value) -> list[Value]:
        """The values nearest to the sum that are made of branches alone, but for their biases."""
        terms = {term for term in self.factors(value) if term.data or self.is_read(term)}
        if terms and terms <= self.branches:
            return [value]
        return [root for part in value.parts if value in self.between for root in self.roots(part)]

    def is_read(self, term: Value) -> bool:
        """Whether a branch depends on a term, not only by way of another one."""
        return any(branch.depends_on({term}, {*self.terms} - {branch}) for branch in self.branches - {term})

    def is_factored(self) -> bool:
        """Whether the shortcut has a factor that the branches do not have."""
        factors = {self.terms[x] for x in self.shortcut if self.is_read(x)}
        return bool(factors - {1.0}) and {*self.terms.values()} != factors
