"""Admin put into a model, and what there is of it: hooks that scale the shortcut of each site.

    LN(x + f(x))   becomes   LN(x + f(x) + (ω - 1) ⊙ x),   ω = omega_init + omega_delta

with omega_init, a buffer that is filled by profiling, and omega_delta, a parameter that starts at 0, of the norm, as in
fairseq's layers (`method.norms`): an optimizer's own copies of the parameters are made before there is a batch. With
ω = 1 the model computes what it did, bit for bit. No forward is copied or replaced, and activation checkpointing runs
both hooks of a site again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import AdminError
from .omega import omega_from_depth
from .sites import Site, find_sites

ATTACHED = "_admin"
"""The attribute of an attached model that has what is attached to it."""

OMEGA = ("omega_init", "omega_delta")
"""The buffer and the parameter of a norm."""


@dataclass
class Attached:
    """What is attached to a model."""

    stacks: list[list[Site]]
    rule: str
    """Of ω: as `attach` was given it."""
    unnested: list[Any]
    """torch's encoders that would make nested tensors of padded batches, through which hooks do not see."""
    hooks: list[RemovableHandle] = field(default_factory=list)

    @property
    def sites(self) -> list[Site]:
        return [site for stack in self.stacks for site in stack]


def attached(model: nn.Module) -> tuple[nn.Module, Attached]:
    """The model that was attached to, which may be inside a wrapper (DDP, torch.compile), and what is attached.

    Raises:
        AdminError: nothing is.
    """
    for module in model.modules():
        if ATTACHED in vars(module):  # a compiled module has the attributes of the one inside
            return module, getattr(module, ATTACHED)
    raise AdminError(f"{type(model).__name__} is not attached; call attach(model, **batch) first.")


def refuse_trained(model: nn.Module, sites: Iterable[Site]) -> None:
    """Refuse to set the ω of a model whose norms around the sites are not as before training: weight 1, bias 0.

    Raises:
        AdminError: it is so.
    """
    for name in {name for site in sites for name in (site.norm, site.writer) if name}:
        norm: Any = model.get_submodule(name)
        if norm.weight.ne(1).any() or (getattr(norm, "bias", None) is not None and norm.bias.any()):
            raise AdminError(
                f"{name} is not at weight 1 and bias 0: the model has been trained (from_pretrained?), and another "
                "omega would destroy what it has learned. Profile a new model, or train this one unprofiled."
            )


def attach(
    model: nn.Module,
    *args: Any,
    sites: Mapping[str, str] | None = None,
    omega: str = "profile",
    **batch: Any,
) -> nn.Module:
    """Put an ω, 1 for now, into every site of a Post-LN model, in place. Call it before the optimizer is made.

    Args:
        model: any, in PyTorch.
        args, batch: what a forward of the model takes; used once, without gradients, to find the sites.
        sites: {norm: module that is given its shortcut}, by name, where all that can be found are not what is wanted.
        omega: "profile": `profile` will set ω. "log" or "constant": it is set from each stack's depth.

    Returns:
        The model.

    Raises:
        AdminError: no site, or one whose ω could not be folded away. The model is as it was.
    """
    if omega not in ("profile", "log", "constant"):
        raise AdminError(f"omega={omega!r}; expected 'profile', 'log' or 'constant'.")
    if any(hasattr(module, ATTACHED) for module in model.modules()):
        raise AdminError(f"{type(model).__name__} is attached already; fold it, or make it again, first.")
    unnested = [module for module in model.modules() if getattr(module, "use_nested_tensor", False)]
    nest(unnested, False)
    try:
        found = Attached(find_sites(model, args, batch, sites), omega, unnested)
        if omega != "profile":
            refuse_trained(model, found.sites)
    except BaseException:
        nest(unnested, True)
        raise
    for site in found.sites:
        norm: Any = model.get_submodule(site.norm)
        norm.register_buffer("omega_init", torch.ones_like(norm.weight, requires_grad=False))
        # Where no norm wrote the shortcut, a learned ω could not be folded away.
        delta = torch.zeros_like(norm.weight, requires_grad=False)
        if site.writer:
            norm.register_parameter("omega_delta", nn.Parameter(delta))
        else:
            norm.register_buffer("omega_delta", delta, persistent=False)
        taker = model.get_submodule(site.taker)
        found.hooks.append(taker.register_forward_pre_hook(site.take, with_kwargs=True))
        found.hooks.append(norm.register_forward_pre_hook(site.scale))
    setattr(model, ATTACHED, found)
    for stack in found.stacks if omega != "profile" else ():
        set_omega(model, stack, torch.full((len(stack),), omega_from_depth(omega, len(stack))))
    return model


def nest(encoders: Iterable[Any], nested: bool) -> None:
    """Let torch's encoders make nested tensors, or not."""
    for encoder in encoders:
        encoder.use_nested_tensor = nested


def set_omega(model: nn.Module, stack: Iterable[Site], omega: Iterable[Tensor]) -> None:
    """Fill omega_init of a stack's sites, a scalar each; where no norm wrote the shortcut it stays 1."""
    for site, value in zip(stack, omega):
        if site.writer:
            model.get_buffer(f"{site.norm}.omega_init").fill_(value)


def omegas(model: nn.Module) -> dict[str, Tensor]:
    """ω of every site, by the name of its norm, in forward order of each stack. Each of shape (C,).

    Raises:
        AdminError: the model is not attached.
    """
    root, found = attached(model)
    norms: dict[str, Any] = {site.norm: root.get_submodule(site.norm) for site in found.sites}
    return {name: (norm.omega_init + norm.omega_delta).detach() for name, norm in norms.items()}


def detach(model: nn.Module) -> None:
    """Take the hooks and ω out of a model again."""
    root, found = attached(model)
    for hook in found.hooks:
        hook.remove()
    for site in found.sites:
        norm = root.get_submodule(site.norm)
        del norm.omega_init, norm.omega_delta
    nest(found.unnested, True)
    delattr(root, ATTACHED)
