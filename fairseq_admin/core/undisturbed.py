"""Run a model without a trace of it afterwards."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[contextlib.ExitStack]:
    """Switch gradients off, and restore everything afterwards: modes, random states, the cache of autocast.

    Yields the ExitStack that is unwound at the end. Callers may add callbacks to it.
    """
    modes = [(module, module.training) for module in model.modules()]
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    with torch.random.fork_rng(list(devices)), torch.no_grad(), contextlib.ExitStack() as undo:
        # Otherwise the next forward would find in autocast's cache weights that were cast without gradients.
        undo.callback(torch.clear_autocast_cache)
        for module, training in reversed(modes):  # the root is restored first
            undo.callback(module.train, training)  # adapters may merge their weights in it
            undo.callback(getattr(module, "reshard", list))  # after a forward FSDP leaves the root's parameters whole
        if "torch._dynamo" in sys.modules:  # otherwise compiled functions would compile the trace, too
            undo.enter_context(torch.compiler.set_stance("force_eager"))
        yield undo
