"""Layers and loss through torch.compile (`--admin-fast compile`). The plain layers are those of method/layers.py.

A layer's forward is one graph, shared by all layers of the same structure. Each size is a symbol of its own, even if
two are equal by chance. So there are few graphs, and the graph of a batch rarely depends on earlier batches.
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
"""Maximum number of graphs of one function: enough for the layers of both stacks in every scheme, with every option."""


def keep_graphs(save_dir: str) -> None:
    """Keep compiled code in the run's folder, for when it resumes, unless TORCHINDUCTOR_CACHE_DIR is set."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(save_dir, "compiled").absolute()))


@functools.cache
def _set_up() -> None:
    """Configure torch's compiler in this process, and log the time of each compilation."""
    from torch._dynamo import callback, config

    config.recompile_limit = GRAPHS
    config.optimize_ddp = False  # it would split graphs at DDP's buckets, which are larger than a layer
    torch.fx.experimental._config.use_duck_shape = False  # sizes that are equal by chance would be one symbol
    starts: list[float] = []

    def log(_: Any) -> None:
        logger.info("Admin: --admin-fast compile: a graph took %.1f s", time.monotonic() - starts.pop())

    callback.on_compile_start(lambda _: starts.append(time.monotonic()))
    callback.on_compile_end(log)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled function. A graph break is an error."""
    _set_up()
    return torch.compile(function, dynamic=True, fullgraph=True, backend=BACKEND)


class _CompiledLayer(Fast):
    """A layer of a scheme. Its plain code computes in evaluation, in profiling, and while the layer is watched."""

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
