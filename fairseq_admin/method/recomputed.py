"""`--checkpoint-activations`: a layer whose backward computes it again, just as the forward did, under --amp too.

fairseq restores the random state for that, but not autocast, which is over by then: it would compute again in float32,
which takes other kernels, more time and more memory. So the forward hands on how it was called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from torch import Tensor, nn


def recomputed(layer: nn.Module, offload: bool) -> nn.Module:
    """Wrap a layer in place, as fairseq does; `offload` keeps its input on the CPU."""
    layer.forward = partial(_within, layer.forward)
    checkpoint_wrapper(layer, offload_to_cpu=offload)
    layer.forward = partial(_telling, layer.forward)
    return layer


def _telling(checkpointed: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """What a caller calls: fairseq hands every keyword to both computations."""
    device, autocast = x.device.type, None
    if torch.is_autocast_enabled(device):
        cached = torch.is_autocast_cache_enabled()
        autocast = {"device_type": device, "dtype": torch.get_autocast_dtype(device), "cache_enabled": cached}
    return checkpointed(x, *args, autocast=autocast, **kwargs)


def _within(forward: Callable[..., Any], *args: Any, autocast: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """What is computed twice."""
    with torch.autocast(**autocast) if autocast else contextlib.nullcontext():
        return forward(*args, **kwargs)
