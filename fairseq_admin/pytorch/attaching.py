"""Admin put into a model, and what there is of it: hooks that scale the shortcut of each site.

    LN(x + f(x))   becomes   LN(x + f(x) + (ω - 1) ⊙ x),   ω = omega_init + omega_delta

with omega_init, a buffer of the norm that is filled by profiling, and omega_delta, a parameter that starts at 0, as in
fairseq's layers (`method.norms`): an optimizer's own copies of the parameters are made before there is a batch. With
ω = 1 the model computes what it did, bit for bit. No forward is replaced; activation checkpointing runs both hooks of a
site again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AdminError
from .omega import omega_from_depth
from .sites import Site, find_sites
from .trace import by_name

ATTACHED = "_admin"  # the attribute of an attached model that has what is attached to it
OMEGA = ("omega_init", "omega_delta")


@dataclass
class Attached:
    """What is attached to a model."""

    stacks: list[list[Site]]
    rule: str  # as `attach` was given omega
    undo: list[Callable[[], object]] = field(default_factory=list)

    @property
    def sites(self) -> list[Site]:
        return [site for stack in self.stacks for site in stack]


def attached(model: nn.Module) -> tuple[nn.Module, Attached]:
    """The model that was attached to, maybe in a wrapper (DDP, torch.compile), and what is attached; or AdminError."""
    for module in model.modules():
        if ATTACHED in vars(module):  # a compiled module has the attributes of the one inside
            return module, vars(module)[ATTACHED]
    raise AdminError(f"{type(model).__name__} is not attached; call attach(model, **batch) first.")


def refuse_trained(sites: list[Site]) -> None:
    """AdminError, if the norms are not as before training: weight 1, bias 0."""
    for site in sites:
        if any(parameter.ne(key == "weight").any() for key, parameter in site.norm.named_parameters()):
            raise AdminError(
                f"{site.name} is not at weight 1 and bias 0: the model has been trained (from_pretrained?), and "
                "another omega would destroy what it has learned. Profile a new model, or train this one unprofiled."
            )


def attach(
    model: nn.Module, *args: Any, sites: Mapping[str, str] | None = None, omega: str = "profile", **batch: Any
) -> nn.Module:
    """Put an ω, 1 for now, into every site of a Post-LN model, in place. Call it before the optimizer is made.

    Args:
        model: any, in PyTorch.
        args, batch: what a forward of the model takes; used once, without gradients, to find the sites.
        sites: {norm: module that is given its shortcut}, by name, where all that can be found are not what is wanted.
        omega: "profile": `profile` will set ω. "log" or "constant": it is set from each stack's depth.

    Raises:
        AdminError: no site, or one whose ω could not be folded away. The model is as it was.
    """
    if omega not in ("profile", "log", "constant"):
        raise AdminError(f"omega={omega!r}; expected 'profile', 'log' or 'constant'.")
    if any(ATTACHED in vars(module) for module in model.modules()):
        raise AdminError(f"{type(model).__name__} is attached already; fold it, or make it again, first.")
    found = Attached(find_sites(model, by_name(model, args, batch), sites), omega)
    if omega != "profile":
        refuse_trained(found.sites)
    for site, sublayers in [(site, len(stack)) for stack in found.stacks for site in stack]:
        norm = site.norm
        norm.register_buffer("omega_init", torch.ones_like(norm.weight))
        # Where no norm wrote the shortcut, a learned ω could not be folded away.
        norm.omega_delta = nn.Parameter(torch.zeros_like(norm.weight)) if site.writer else 0.0
        if omega != "profile":
            site.set_omega(omega_from_depth(omega, sublayers))
        found.undo.append(site.taker.register_forward_pre_hook(site.take, with_kwargs=True).remove)
        found.undo.append(norm.register_forward_pre_hook(site.scale).remove)
    # torch's encoders make nested tensors of padded batches, through which hooks do not see.
    for encoder in [module for module in model.modules() if getattr(module, "use_nested_tensor", False)]:
        found.undo.append(partial(setattr, encoder, "use_nested_tensor", True))
        setattr(encoder, "use_nested_tensor", False)  # noqa: B010
    vars(model)[ATTACHED] = found
    return model


def omegas(model: nn.Module) -> dict[str, Tensor]:
    """ω of every site of an attached model, shape (C,), by the name of its norm, in forward order of each stack."""
    return {site.name: site.omega for site in attached(model)[1].sites}


def detach(model: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """Make an attached model the stock one again, in place, with these weights."""
    root, found = attached(model)
    for undo in found.undo:
        undo()
    for site in found.sites:
        del site.norm.omega_init, site.norm.omega_delta
    del vars(root)[ATTACHED]
    root.load_state_dict(weights)
    return root
