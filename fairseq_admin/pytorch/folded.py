"""ω folded out of an attached model: the stock model again, with the same function.

The norm that wrote a shortcut writes it ω times as large, and the weights that read it undo that (see `folding`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AdminError
from .attaching import attached, detach, omegas
from .folding import divide_input, divisible, largest_difference, scale_output
from .trace import tensors, undisturbed

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
"""By how much outputs may differ, as a share of the largest (or of 1): weights are rounded again. Others: 0.1."""


INSIDE = ("hidden_states", "mems")
"""What models may give of the streams inside, which the fold scales."""


def folded_weights(root: nn.Module) -> dict[str, Tensor]:
    """The parameters that the fold changes, by name, in their own types.

    Raises:
        AdminError: an entry of ω is too near to 0.
    """
    _, found = attached(root)
    weights: dict[str, Tensor] = {}

    def weight(name: str) -> Tensor:
        return weights.get(name, root.get_parameter(name).detach())

    omega_of = omegas(root)
    for site in found.sites:
        if site.writer is None:
            continue
        omega = divisible(omega_of[site.norm], f"omega of {site.norm}")
        for name, parameter in root.get_submodule(site.writer).named_parameters(recurse=False):
            if name in ("weight", "bias"):
                weights[f"{site.writer}.{name}"] = scale_output(parameter.detach(), omega)
        for reader in site.readers:
            start, end = reader.rows or (0, weight(reader.parameter).size(0))
            whole = weight(reader.parameter).double().clone()
            whole[start:end] = divide_input(whole[start:end], omega, reader.axis)
            weights[reader.parameter] = whole
    return {name: tensor.to(root.get_parameter(name).dtype) for name, tensor in weights.items()}


def folded_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the stock model that computes what an attached one does, which goes on as it is.

    Raises:
        AdminError: the model is not attached, or an entry of ω is too near to 0.
    """
    root, found = attached(model)
    known = {id(root.get_parameter(name)): tensor for name, tensor in folded_weights(root).items()}
    own = {f"{site.norm}.{name}" for site in found.sites for name in ("omega_init", "omega_delta")}
    state = root.state_dict(keep_vars=True)
    return {key: known.get(id(tensor), tensor.detach()) for key, tensor in state.items() if key not in own}


def outputs(model: nn.Module, args: tuple, batch: dict[str, Any], replaced: dict[str, Tensor]) -> list[Tensor]:
    """What a model computes in evaluation mode with other parameters in the places of some, without hidden states."""
    with undisturbed(model):
        model.eval()
        result = torch.func.functional_call(model, replaced, args, batch)
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
    root, found = attached(model)
    weights = folded_weights(root)
    if args or batch:
        one = {
            f"{site.norm}.{name}": torch.full_like(getattr(root.get_submodule(site.norm), name), value)
            for site in found.sites
            for name, value in (("omega_init", 1.0), ("omega_delta", 0.0))[: 2 if site.writer else 1]
        }
        for before, after in zip(outputs(root, args, batch, {}), outputs(root, args, batch, {**weights, **one})):
            apart = largest_difference(before, after) / max(1.0, before.abs().max().item())
            if not apart <= TOLERANCE.get(before.dtype, 0.1):
                raise AdminError(
                    f"the folded model is off by {apart:.2g} of its largest output; at most "
                    f"{TOLERANCE.get(before.dtype, 0.1):g} was expected. Keep the model unfolded, and report its class."
                )
    with torch.no_grad():
        for name, tensor in weights.items():
            root.get_parameter(name).copy_(tensor)
    torch.clear_autocast_cache()
    detach(root)
    return model
