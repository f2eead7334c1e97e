"""What every fast module has: the way back to the plain one, which it is held against, and the code for its device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn


class Fast:
    """First base class of a fast module; the second is the plain one, whose `forward` computes where this one's cannot.

    A module is turned into a fast one by its `__class__`, so parameters, initial weights, hooks and names stay.
    """

    plain: bool = False
    """Whether the plain module computes at present."""
    gpu_code: bool = False
    """Whether tensors on a CPU take a GPU's code too: compiled layers, tests, and the host's time."""

    def on_cpu(self, x: Tensor) -> bool:
        """Whether to take the code for CPUs."""
        return x.is_cpu and not self.gpu_code


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
