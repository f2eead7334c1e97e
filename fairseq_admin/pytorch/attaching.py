"""Admin put into a model, and what there is of it: hooks that scale the shortcut of each site.

    LN(x + f(x))   becomes   LN(x + f(x) + (ω - 1) ⊙ x),   ω = omega_init + omega_delta

with omega_init, a buffer that is filled by profiling, and omega_delta, a parameter that starts at 0, of the norm, as in
fairseq's layers (`method.norms`): an optimizer's own copies of the parameters are made before there is a batch. With
ω = 1 the model computes what it did, bit for bit. No forward is copied or replaced, and activation checkpointing runs
both hooks of a site again.

The hooks are objects that share a site's state, so that a deep copy of the model has a state of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AdminError
from .omega import omega_from_depth
from .sites import Finder, Site
from .trace import trace

ATTACHED = "_admin"
"""The attribute of an attached model that has what is attached to it."""


class Shortcut:
    """The shortcut of one site, between the call of the module that takes it and that of the norm."""

    tensor: Tensor | None = None


@dataclass
class Take:
    """Remembers the shortcut: a hook of the module that takes it."""

    shortcut: Shortcut
    argument: str
    position: int

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.shortcut.tensor = kwargs[self.argument] if self.argument in kwargs else args[self.position]


@dataclass
class Scale:
    """Adds (ω - 1) ⊙ x to the sum x + f(x): a hook of the norm that reads it."""

    shortcut: Shortcut

    def __call__(self, norm: Any, args: tuple) -> tuple | None:
        x, self.shortcut.tensor = self.shortcut.tensor, None
        if norm.omega_delta is None:
            return None
        assert x is not None, "the norm ran without the module that takes its shortcut"
        total = args[0]
        # Under autocast the sum may be of another type than x; it is to stay what it is.
        more = x * (norm.omega_init - 1 + norm.omega_delta).to(x.dtype)
        return total + more.to(total.dtype), *args[1:]


@dataclass
class Attached:
    """What is attached to a model: its sites, the rule of their ω, and the encoders kept from nested tensors."""

    sites: list[Site]
    rule: str
    unnested: list[str]

    def stacks(self) -> list[list[Site]]:
        """The sites of each stack: one site's norm writes the next one's shortcut."""
        stacks: list[list[Site]] = []
        for site in self.sites:
            stack = next((stack for stack in stacks if stack[-1].norm == site.writer), None)
            if stack is None:
                stacks.append([site])
            else:
                stack.append(site)
        return stacks


def attached(model: nn.Module) -> tuple[nn.Module, Attached]:
    """The model that was attached to, which may be inside a wrapper (DDP, torch.compile), and what is attached.

    Raises:
        AdminError: nothing is.
    """
    for module in model.modules():
        if hasattr(module, ATTACHED):
            return module, getattr(module, ATTACHED)
    raise AdminError(f"{type(model).__name__} is not attached; call attach(model, **batch) first.")


def shortcut_at(norm: nn.Module) -> Shortcut:
    """That of the site of a norm."""
    return next(hook.shortcut for hook in norm._forward_pre_hooks.values() if isinstance(hook, Scale))


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
    name = type(model).__name__
    if omega not in ("profile", "log", "constant"):
        raise AdminError(f"omega={omega!r}; expected 'profile', 'log' or 'constant'.")
    if any(hasattr(module, ATTACHED) for module in model.modules()):
        raise AdminError(f"{name} is attached already; fold it, or make it again, first.")
    unnested = [where for where, module in model.named_modules() if getattr(module, "use_nested_tensor", False)]
    _nest(model, unnested, False)  # hooks do not see through nested tensors
    try:
        finder = Finder(trace(model, args, batch))
        found = Attached(finder.sites(sites), omega, unnested)
        if finder.refused:
            raise AdminError(
                f"{name}: {finder.refused[0]}"
                + (f" ({len(finder.refused) - 1} more)" if len(finder.refused) > 1 else "")
                + f", so omega could not be folded away there ({len(found.sites)} other sites). "
                "Name those that are to be attached: sites={norm: module that is given its shortcut}."
            )
        if not found.sites:
            raise AdminError(
                f"{name}: no site. None of its {finder.norms} norms is alone in reading a sum x + f(x) of a norm's "
                "output x; in Pre-LN the sum goes on. Admin is for Post-LN."
            )
        if omega != "profile":
            refuse_trained(model, found.sites)
    except BaseException:
        _nest(model, unnested, True)
        raise
    for site in found.sites:
        _hang(model, site)
    setattr(model, ATTACHED, found)
    if omega != "profile":
        for stack in found.stacks():
            set_omega(model, stack, torch.full((len(stack),), omega_from_depth(omega, len(stack))))
    return model


def _nest(model: nn.Module, encoders: list[str], nested: bool) -> None:
    """Let torch's encoders make nested tensors of padded batches in evaluation, or not."""
    for name in encoders:
        encoder: Any = model.get_submodule(name)
        encoder.use_nested_tensor = nested


def _hang(model: nn.Module, site: Site) -> None:
    """Give a norm its ω, and hang the two hooks of its site."""
    norm: Any = model.get_submodule(site.norm)
    weight, shortcut = norm.weight, Shortcut()
    norm.register_buffer("omega_init", torch.ones_like(weight, requires_grad=False))
    # Where no norm wrote the shortcut, a learned ω could not be folded away.
    norm.register_parameter("omega_delta", nn.Parameter(torch.zeros_like(weight)) if site.writer else None)
    take = Take(shortcut, site.taking.argument, site.taking.position)
    model.get_submodule(site.taking.module).register_forward_pre_hook(take, with_kwargs=True)
    norm.register_forward_pre_hook(Scale(shortcut))


def set_omega(model: nn.Module, stack: Iterable[Site], omega: Iterable[Tensor]) -> None:
    """Fill omega_init of a stack's sites, a scalar each; where no norm wrote the shortcut it stays 1."""
    for site, value in zip(stack, omega):
        if site.writer:
            model.get_buffer(f"{site.norm}.omega_init").fill_(value)


def omegas(model: nn.Module) -> dict[str, Tensor]:
    """ω of every site, by the name of its norm, in forward order. Each of shape (C,).

    Raises:
        AdminError: the model is not attached.
    """
    root, found = attached(model)
    norms: dict[str, Any] = {site.norm: root.get_submodule(site.norm) for site in found.sites}
    return {
        name: (norm.omega_init + (0 if norm.omega_delta is None else norm.omega_delta)).detach().clone()
        for name, norm in norms.items()
    }


def detach(model: nn.Module) -> None:
    """Take the hooks and ω out of a model again."""
    root, found = attached(model)
    for module in root.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, (Take, Scale)):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
    for site in found.sites:
        norm = root.get_submodule(site.norm)
        del norm.omega_init, norm.omega_delta
    _nest(root, found.unnested, True)
    delattr(root, ATTACHED)
