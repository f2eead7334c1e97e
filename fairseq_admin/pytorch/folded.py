"""ω folded out of an attached model: the stock model again, with the same function.

The norm that wrote a shortcut writes it ω times as large, and the weights that read it undo that (see `folding`).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AdminError
from .attaching import OMEGA, attached, detach
from .folding import divisible, largest_difference, scale
from .reading import tensors
from .trace import by_name, undisturbed

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
"""By how much outputs may differ, as a share of the largest (or of 1): weights are rounded again. Others: 0.1."""

INSIDE = ("hidden_states", "mems")
"""What models may give of the streams inside, which the fold scales."""


def folded_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the stock model that computes what an attached one does, which goes on as it is.

    Raises:
        AdminError: the model is not attached, or an entry of ω is too near to 0.
    """
    root, found = attached(model)
    weights = {name: parameter.detach() for name, parameter in root.named_parameters()}
    for site in found.sites:
        if site.writer is None:
            continue
        omega = divisible(site.omega, f"omega of {site.name}")
        for name, _ in root.get_submodule(site.writer).named_parameters(site.writer):
            weights[name] = scale(weights[name], omega, 0)
        for name, reader in site.readers.items():
            weights[name] = reader.divided(weights[name], omega)
    # By identity, for tied parameters have several keys.
    folded = {id(parameter): weights[name].to(parameter.dtype) for name, parameter in root.named_parameters()}
    state = root.state_dict(keep_vars=True)
    return {key: folded.get(id(t), t.detach()) for key, t in state.items() if not key.endswith(OMEGA)}


def outputs(model: nn.Module, batch: dict[str, Any]) -> list[Tensor]:
    """What a model computes in evaluation mode, without hidden states."""
    with undisturbed(model):
        model.eval()
        result = model(**batch)
    if isinstance(result, dict):
        result = [value for key, value in result.items() if not key.endswith(INSIDE)]
    return [tensor for tensor in tensors(result) if tensor.is_floating_point()]


def fold(model: nn.Module, *args: Any, **batch: Any) -> nn.Module:
    """Make the stock model of an attached one, in place: no ω, no hook, the same function.

    Args:
        model: attached.
        args, batch: what a forward takes, if the fold is to be checked on it first, with a copy of the model.

    Raises:
        AdminError: an entry of ω is too near to 0, or the outputs differ. The model is as it was.
    """
    root, _ = attached(model)
    stock = folded_state_dict(root)
    if args or batch:
        named = by_name(root, args, batch)
        before = outputs(root, named)
        for old, new in zip(before, outputs(detach(copy.deepcopy(root), stock), named)):
            apart = largest_difference(old, new) / max(1.0, old.abs().max().item())
            allowed = TOLERANCE.get(old.dtype, 0.1)
            if not apart <= allowed:
                raise AdminError(
                    f"the folded model is off by {apart:.2g} of its largest output; at most {allowed:g} was expected. "
                    "Keep the model unfolded, and report its class."
                )
    detach(root, stock)
    torch.clear_autocast_cache()
    return model
