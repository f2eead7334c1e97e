"""The base class of fast modules: a switch back to the plain module, and the choice of the code for a device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn


class Fast:
    """First base class of a fast module. The second is the plain one, whose `forward` takes all other cases.

    A module becomes fast by a change of its `__class__`, so parameters, initial weights, hooks and names stay.
    """

    plain: bool = False
    """Whether the plain `forward` runs at the moment."""
    gpu_code: bool = False
    """Whether the code for GPUs also runs on CPU tensors: in tests, and when the host is timed."""

    def on_cpu(self, x: Tensor) -> bool:
        """Whether to run the code for CPUs."""
        return x.is_cpu and not self.gpu_code


@contextlib.contextmanager
def plain_layers(model: nn.Module) -> Iterator[None]:
    """In this context the plain modules run, so the results are the same bits as with --admin-fast off."""
    fast = [module for module in model.modules() if isinstance(module, Fast) and not module.plain]
    for module in fast:
        module.plain = True
    try:
        yield
    finally:
        for module in fast:
            module.plain = False
