"""The way back from fast modules to the plain ones, which they are held against."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


class Fast:
    """First base class of a fast module; the second is the plain one, whose `forward` computes where this one's cannot.

    A module is turned into a fast one by its `__class__`, so parameters, initial weights, hooks and names stay.
    """

    plain: bool = False
    """Whether the plain module computes at present."""


@contextlib.contextmanager
def plain_layers(model: nn.Module) -> Iterator[None]:
    """Within this context the plain modules compute: the same numbers, to the last bit, as without fast ones."""
    fast = [module for module in model.modules() if isinstance(module, Fast) and not module.plain]
    for module in fast:
        module.plain = True
    try:
        yield
    finally:
        for module in fast:
            module.plain = False
