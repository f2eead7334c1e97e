"""Options of a command, as a person types them: parsed, merged, compared, and shortened to a part of a name.

A set of options is a dict from the name, such as --lr, to its values as they are quoted for a shell. A flag has no
values. `--lr=` takes an option of a recipe away.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Container, Iterable
from contextlib import suppress

Options = dict[str, str]
TAKEN_AWAY = "="
"""The value of an option that is taken away, among a user's options."""
LONGEST = 100
"""Characters of a name that tells options apart. A longer one ends in a hash."""


def parse(text: str | Iterable[str]) -> Options:
    """Parse options. Of an option that comes twice, the last counts.

    Args:
        text: as a shell reads it, or several such texts.

    Raises:
        ValueError: a quote is not closed, or the text does not begin with an option.
    """
    options: dict[str, list[str]] = {}
    values: list[str] | None = None
    for word in shlex.split(text if isinstance(text, str) else " ".join(text)):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            values = options[name] = [value or TAKEN_AWAY] if equals else []
        elif values is None:
            raise ValueError(f"{word}: expected an option, as in --dropout 0.2.")
        else:
            values.append(word)
    return {name: shlex.join(values) for name, values in options.items()}


def merge(base: Options, *more: Options) -> Options:
    """The options, each later set over the earlier ones."""
    merged = dict(base)
    for options in more:
        merged |= options
    return {name: value for name, value in merged.items() if value != TAKEN_AWAY}


def without(options: Options, names: Container[str]) -> Options:
    return {name: value for name, value in options.items() if name not in names}


def words(options: Options) -> list[str]:
    """The words of a command line."""
    return [word for name, value in options.items() for word in (name, *shlex.split(value))]


def same(one: str | None, other: str | None) -> bool:
    """Whether two values are equal; 1e-3 equals 0.001."""
    with suppress(TypeError, ValueError):
        return float(one) == float(other)  # type: ignore[arg-type]
    return one == other


def changes(before: Options, now: Options) -> Options:
    """The options of `now` that differ from `before`. An option that `now` lacks is marked as taken away."""
    names = dict.fromkeys([*before, *now])
    changed = {name: now.get(name, TAKEN_AWAY) for name in names}
    return {name: value for name, value in changed.items() if not same(before.get(name), now.get(name))}


def differences(before: Options, now: Options) -> list[str]:
    """The differences in words, each as "--lr 0.0007 -> 0.001"."""
    shown = {name: f"{name} {before.get(name, 'unset') or 'on'}" for name in changes(before, now)}
    return [f"{text} -> {now.get(name, 'unset') or 'on'}" for name, text in shown.items()]


def _of_both_stacks(options: Options) -> Options:
    """The options, with one --NAME instead of --encoder-NAME and --decoder-NAME of the same value."""
    joined = {}
    for name, value in options.items():
        for one, other in (("--encoder-", "--decoder-"), ("--decoder-", "--encoder-")):
            if name.startswith(one) and options.get(name.replace(one, other)) == value:
                name = name.replace(one, "--")
        joined[name] = value
    return joined


def part_of_name(options: Options) -> str:
    """Options as a part of a folder's name: lr5e-4-dropout0.2, no-share-all-embeddings."""
    parts = (
        f"no-{name[2:]}" if value == TAKEN_AWAY else name[2:] + re.sub(r"[^\w.+-]+", "_", value).strip("_")
        for name, value in _of_both_stacks(options).items()
    )
    name = "-".join(parts)
    return name if len(name) <= LONGEST else f"{name[:LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
