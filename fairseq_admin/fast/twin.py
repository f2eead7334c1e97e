"""What every fast module has: a way back to the plain one that it replaces, its twin."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


class Fast:
    """First base class of a fast module; the second is its twin, whose `forward` it falls back on.

    A module is turned into a fast one by its `__class__`, so parameters, initial weights, hooks and names stay.
    """

    plain: bool = False
    """Whether the twin computes at present."""

    def make_generation_fast_(self, **kwargs: Any) -> None:
        """fairseq's sign that the model will only generate: from here on the twin computes, so output is the same."""
        self.plain = True
        twins = getattr(super(), "make_generation_fast_", None)
        if twins is not None:
            twins(**kwargs)


@contextlib.contextmanager
def twins_of(model: nn.Module) -> Iterator[None]:
    """Within this context the twins compute: the same numbers, to the last bit, as without fast modules."""
    fast = [module for module in model.modules() if isinstance(module, Fast) and not module.plain]
    for module in fast:
        module.plain = True
    try:
        yield
    finally:
        for module in fast:
            module.plain = False
