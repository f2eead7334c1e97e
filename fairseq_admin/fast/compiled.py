"""Layers and loss through torch.compile (`--admin-fast compile`); the plain layers are those of method/layers.py.

A layer's forward is one graph, and layers of one structure share it. Sizes are symbols that are never equal by chance,
so few graphs are made, and seldom does which of them computes a batch depend on the batches before.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..method.layers import SchemeDecoderLayer, SchemeEncoderLayer
from .plain import Fast

logger = logging.getLogger(__name__)

BACKEND = "inductor"
GRAPHS = 64
"""Graphs of one function before torch gives up: enough for every scheme's layers, in both stacks, with every option."""


def keep_graphs(save_dir: str) -> None:
    """Have torch keep what it compiles in a run's folder, unless TORCHINDUCTOR_CACHE_DIR names another."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(save_dir, "compiled").absolute()))


@functools.cache
def _set_up() -> None:
    """Torch's compiler for this process, and a line of the log for each compilation."""
    from torch._dynamo import callback, config

    config.recompile_limit = GRAPHS
    config.optimize_ddp = False  # it would cut a layer's graph at DDP's buckets, which are larger than a layer
    torch.fx.experimental._config.use_duck_shape = False  # sizes that are equal by chance would be one symbol
    starts: list[float] = []

    def log(_: Any) -> None:
        logger.info("Admin: --admin-fast compile: a graph took %.1f s", time.monotonic() - starts.pop())

    callback.on_compile_start(lambda _: starts.append(time.monotonic()))
    callback.on_compile_end(log)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function through torch.compile. A break of its graph is an error."""
    _set_up()
    return torch.compile(function, dynamic=True, fullgraph=True, backend=BACKEND)


class _CompiledLayer(Fast):
    """A layer of a scheme. In evaluation, profiling and while a layer is watched, its plain code computes."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As fairseq's."""
        forward = super().forward.__func__  # type: ignore[misc]
        if not (self.plain or x.dim() > 2 or "residual_connection" in vars(self)):
            forward = compiled(forward)
        return forward(self, x, *args, **kwargs)


class CompiledEncoderLayer(_CompiledLayer, SchemeEncoderLayer):
    """fairseq's encoder layer with the sub-layers of a scheme."""


class CompiledDecoderLayer(_CompiledLayer, SchemeDecoderLayer):
    """fairseq's decoder layer with the sub-layers of a scheme."""
