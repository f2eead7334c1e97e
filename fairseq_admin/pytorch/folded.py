"""ω folded out of an attached model: the stock model again, with the same function.

The norm that wrote a shortcut writes it ω times as large, and the weights that read it undo that (see `folding`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AdminError
from .attaching import OMEGA, attached, detach, omegas
from .batch import Batch
from .folding import divisible, largest_difference, scale_output
from .reading import tensors
from .trace import undisturbed

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
    omega_of, state = omegas(root), root.state_dict(keep_vars=True)
    parameters = dict(root.named_parameters())
    weights: dict[str, Tensor] = {}

    for site in found.sites:
        if site.writer is None:
            continue
        omega = divisible(omega_of[site.norm], f"omega of {site.norm}")
        for name, _ in root.get_submodule(site.writer).named_parameters(site.writer, recurse=False):
            weights[name] = scale_output(parameters[name].detach(), omega)
        for reader in site.readers:
            name = reader.parameter
            weights[name] = reader.divided(weights.get(name, parameters[name].detach()), omega)
    folded = {id(parameters[name]): tensor.to(parameters[name].dtype) for name, tensor in weights.items()}
    return {key: folded.get(id(t), t.detach()) for key, t in state.items() if not key.endswith(OMEGA)}


def outputs(model: nn.Module, batch: dict[str, Any], replaced: dict[str, Tensor]) -> list[Tensor]:
    """What a model computes in evaluation mode with other parameters in the places of some, without hidden states."""
    with undisturbed(model):
        model.eval()
        result = torch.func.functional_call(model, replaced, (), batch)
    if isinstance(result, dict):
        result = [value for key, value in result.items() if not key.endswith(INSIDE)]
    return [tensor for tensor in tensors(result) if tensor.is_floating_point()]


def fold(model: nn.Module, *args: Any, **batch: Any) -> nn.Module:
    """Make the stock model of an attached one, in place: no ω, no hook, the same function.

    Args:
        model: attached.
        args, batch: what a forward takes, if the fold is to be checked on it first.

    Returns:
        The model.

    Raises:
        AdminError: an entry of ω is too near to 0, or the outputs differ. The model is as it was.
    """
    root, _ = attached(model)
    stock = folded_state_dict(root)
    if args or batch:
        named = Batch(root, args, batch).named
        replaced = {name: stock[name] for name, _ in root.named_parameters() if name in stock}
        for name, tensor in [*root.named_buffers(), *root.named_parameters()]:
            if name.endswith(OMEGA):
                replaced[name] = torch.full_like(tensor, name.endswith("init"))
        for before, after in zip(outputs(root, named, {}), outputs(root, named, replaced)):
            apart = largest_difference(before, after) / max(1.0, before.abs().max().item())
            allowed = TOLERANCE.get(before.dtype, 0.1)
            if not apart <= allowed:
                raise AdminError(
                    f"the folded model is off by {apart:.2g} of its largest output; at most {allowed:g} was expected. "
                    "Keep the model unfolded, and report its class."
                )
    detach(root)
    root.load_state_dict(stock)
    torch.clear_autocast_cache()
    return model
