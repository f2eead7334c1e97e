"""Count operations, waits for the device, and bytes kept for the backward, in one forward, loss and backward.

An operation is a call that torch dispatches to a kernel: the innermost aten:: call in the profiler, without calls that
only describe memory (views, empty tensors).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

UNCOUNTED = set(
    "view _unsafe_view reshape _reshape_alias t transpose permute expand slice select unsqueeze squeeze as_strided "
    "detach alias split split_with_sizes unbind chunk narrow empty empty_like empty_strided new_empty "
    "new_empty_strided lift_fresh _local_scalar_dense".split()
)


class Operations(TorchDispatchMode):
    """Counts the calls of each name, and how often the host waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.waits = 0

    @property
    def number(self) -> int:
        """The number of calls that compute."""
        return sum(number for name, number in self.calls.items() if name not in UNCOUNTED)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__.split(".")[0]
        self.calls[name] += 1
        # Only reads of bool tensors count. fairseq also reads integers (positions), but these are always on the CPU.
        self.waits += name == "_local_scalar_dense" and args[0].dtype == torch.bool
        return function(*args, **(kwargs or {}))


def counts(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, float]:
    """Operations, waits and MiB kept, of one forward, loss and backward."""
    with Operations() as operations:
        loss().backward()
    model.zero_grad(set_to_none=True)
    kept: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()  # the tensor itself would keep its own graph node alive

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = loss()
    del result
    return {"operations": operations.number, "waits": operations.waits, "kept_mib": sum(kept.values()) / 2**20}
