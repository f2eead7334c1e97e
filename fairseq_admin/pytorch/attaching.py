"""Admin put into a model and folded out of it: hooks that scale the shortcut of each site.

    LN(x + f(x))   becomes   LN(x + f(x) + (ω - 1) ⊙ x),   ω = omega_init + omega_delta

with omega_init, a buffer of the norm that is filled by profiling, and omega_delta, a parameter that starts at 0, as in
fairseq's layers (`method.norms`): an optimizer's own copies of the parameters are made before there is a batch. With
ω = 1 the model computes what it did, bit for bit. No forward is replaced. The fold leaves the stock model with the same
function: the norm that wrote a shortcut writes it ω times as large, and what reads it undoes that (see `folding`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AdminError
from .batch import call, one_batch
from .folding import divisible, largest_difference, scale, whole
from .omega import omega_from_depth
from .reading import tensors
from .sites import Site, find_sites
from .trace import undisturbed

ATTACHED = "_admin"  # the attribute of an attached model that has what is attached to it
OMEGA = ("omega_init", "omega_delta")
WRAPPED = ("_orig_mod", "device_ids", "unshard", "_fsdp_wrapped_module")  # has torch.compile, (D)DP, or FSDP
INSIDE = ("hidden_states", "mems")  # what models may give of the streams inside
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}  # of a fold's outputs, as a share of the largest, or of 1


@dataclass
class Attached:
    """What is attached to a model."""

    stacks: list[list[Site]]
    undo: list[Callable[[], object]] = field(default_factory=list)

    @property
    def sites(self) -> list[Site]:
        return [site for stack in self.stacks for site in stack]

    def forget(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Let go of what a forward left that ended with an error (out of memory): a hook of the model."""
        for device in {tensor.device for tensor in tensors([args, kwargs])}:
            for site in self.sites:
                site.shortcuts.pop(device, None)


def attached(model: nn.Module) -> tuple[nn.Module, Attached]:
    """The model that was attached to, maybe in a wrapper (DDP, torch.compile), and what is attached; or AdminError."""
    found = {name: module for name, module in model.named_modules() if ATTACHED in vars(module)}
    if not found:
        raise AdminError(f"{type(model).__name__} is not attached; call attach(model, batch) first.")
    root, *others = found.values()
    attachment = vars(root)[ATTACHED]
    if any(
        vars(other)[ATTACHED] is not attachment for other in others
    ):  # a compiled module has those of the one inside
        raise AdminError(f"{' and '.join(found)} of {type(model).__name__} are attached, each for itself: give one.")
    return root, attachment


def refuse_trained(sites: list[Site]) -> None:
    """AdminError, if the norms are not as before training: weight 1, bias 0; by other names, either."""
    for site in sites:
        for key, parameter in site.norm.named_parameters():
            begins = {"weight": (1,), "bias": (0,), "omega_delta": (0,)}.get(key, (0, 1))
            if all((parameter + site.offsets.get(key, 0.0)).ne(value).any() for value in begins):
                raise AdminError(
                    f"{site.name} is not at weight 1 and bias 0: the model has been trained (from_pretrained?), and "
                    "another omega would destroy what it has learned. Profile a new model, or train this one "
                    "unprofiled."
                )


@one_batch
def attach(
    model: nn.Module, batch: Any, *, sites: Mapping[str, str] | None = None, omega: str = "profile"
) -> nn.Module:
    """Put an ω, 1 for now, into every site of a Post-LN model, in place. Call it before the optimizer is made.

    ω is learned where the site's norm is.

    Args:
        batch: what a forward of the model takes (see `batch`); used once, without gradients, to find the sites.
        sites: {norm: module that is given its shortcut}, by name, where all that can be found are not what is wanted.
        omega: "profile": `profile` will set ω. "log" or "constant": it is set from each stack's depth.

    Raises:
        AdminError: no site, one whose ω could not be folded away; compiled, wrapped, sharded. The model is as it was.
    """
    if omega not in ("profile", "log", "constant"):
        raise AdminError(f"omega={omega!r}; expected 'profile', 'log' or 'constant'.")
    for module in model.modules():
        if ATTACHED in vars(module):
            raise AdminError(f"{type(model).__name__} is attached already; fold it, or make it again, first.")
        if module._compiled_call_impl or any(hasattr(module, name) for name in WRAPPED):  # takes no notice of it
            raise AdminError(f"{type(module).__name__} is compiled, wrapped or sharded; attach to the model before.")
    attachment = Attached(find_sites(model, batch, sites))
    if omega != "profile":
        refuse_trained(attachment.sites)
    for site, sublayers in [(site, len(stack)) for stack in attachment.stacks for site in stack]:
        norm, like = site.norm, next(site.norm.parameters())
        norm.register_buffer("omega_init", torch.ones_like(like))
        # Where no norm wrote the shortcut, a learned ω could not be folded away.
        norm.omega_delta = nn.Parameter(torch.zeros_like(like), like.requires_grad) if site.writer else 0.0
        if omega != "profile":
            site.set_omega(omega_from_depth(omega, sublayers))
        attachment.undo.append(site.taker.register_forward_pre_hook(site.take, with_kwargs=True).remove)
        attachment.undo.append(norm.register_forward_pre_hook(site.scale).remove)
    attachment.undo.append(model.register_forward_pre_hook(attachment.forget, with_kwargs=True).remove)
    # torch's encoders make nested tensors of padded batches, through which hooks do not see.
    for encoder in [module for module in model.modules() if getattr(module, "use_nested_tensor", False)]:
        attachment.undo.append(partial(setattr, encoder, "use_nested_tensor", True))
        setattr(encoder, "use_nested_tensor", False)  # noqa: B010
    vars(model)[ATTACHED] = attachment
    return model


def omegas(model: nn.Module) -> dict[str, Tensor]:
    """ω of every site of an attached model, shape (C,), by the name of its norm, in forward order of each stack."""
    return {site.name: site.omega for site in attached(model)[1].sites}


def detach(model: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """Make an attached model the stock one again, in place, with these weights."""
    root, attachment = attached(model)
    for undo in attachment.undo:
        undo()
    for site in attachment.sites:
        del site.norm.omega_init, site.norm.omega_delta
    del vars(root)[ATTACHED]
    root.load_state_dict(weights)
    return root


def folded_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The stock model's whole state dict; the attached one goes on as it is. In shards (FSDP) every rank has to call.

    Raises:
        AdminError: the model is not attached, an entry of ω is too near to 0, or its state_dict leaves out a weight.
    """
    root, attachment = attached(model)
    state = root.state_dict(keep_vars=True)
    if left_out := {name for name, _ in root.named_parameters()} - state.keys():
        raise AdminError(f"{min(left_out)} is not in the state_dict of {type(root).__name__}, which has to be whole.")
    # By identity, for tied parameters have several keys.
    weights = {id(parameter): whole(parameter.detach()).clone() for parameter in root.parameters()}
    for site in [site for site in attachment.sites if site.writer]:
        omega = divisible(site.omega, f"omega of {site.name}")
        for name, offset in site.written.items():
            key = id(root.get_parameter(name))
            weights[key] = scale(weights[key].double() + offset, omega, 0) - offset
        for name, reader in site.readers.items():
            key = id(root.get_parameter(name))
            weights[key] = reader.divided(weights[key], omega)

    def stock(entry: Any) -> Any:
        if id(entry) in weights:
            return weights[id(entry)].to(entry.dtype)
        return entry.clone() if isinstance(entry, Tensor) else copy.deepcopy(entry)  # of get_extra_state

    return {key: stock(entry) for key, entry in state.items() if not key.endswith(OMEGA)}


def outputs(model: nn.Module, batch: Any) -> tuple[list[Tensor], set[torch.dtype]]:
    """What a model computes in evaluation mode, without hidden states, which the fold scales; in which types it does.

    Raises:
        AdminError: no tensor is found in what it gives.
    """
    types: set[torch.dtype] = set()

    def look(module: nn.Module, args: tuple, made: object) -> None:
        types.update(t.dtype for t in tensors(made) if t.is_floating_point())

    with undisturbed(model) as undo:
        model.eval()
        for module in model.modules():
            undo.callback(module.register_forward_hook(look).remove)
        result = call(model, batch)
    shown = [result[key] for key in result if not key.endswith(INSIDE)] if isinstance(result, dict) else result
    found = list(filter(torch.is_floating_point, tensors(shown)))
    if not found:
        raise AdminError(
            f"{type(model).__name__} gives a {type(result).__name__}, in which no tensor is found to compare. Call "
            "fold(model) without a batch, and compare what it gives before and after."
        )
    return found, types


@one_batch
def fold(model: nn.Module, batch: Any = None) -> nn.Module:
    """Make the stock model of an attached one, in place: no ω, no hook, the same function.

    Args:
        batch: what a forward takes (see `batch`), if the fold is to be checked on it first, with a copy of the model.

    Raises:
        AdminError: an entry of ω is too near to 0, or the outputs differ. The model is as it was.
    """
    root, _ = attached(model)
    if any(hasattr(parameter, "full_tensor") for parameter in root.parameters()):
        raise AdminError("FSDP has this model in shards; load folded_state_dict(model) into a stock one that is whole.")
    stock = folded_state_dict(root)
    if batch is not None:
        before, types = outputs(root, batch)
        after, _ = outputs(detach(copy.deepcopy(root), stock), batch)
        allowed = max(TOLERANCE.get(dtype, torch.finfo(dtype).eps ** 0.5) for dtype in types)  # autocast has several
        for old, new in zip(before, after, strict=True):
            moved = ~torch.isclose(old, new, rtol=0, atol=0, equal_nan=True)  # not what a mask has put there
            old, new = old[moved], new[moved]
            apart = largest_difference(old, new) / max(1.0, largest_difference(old, torch.zeros_like(old)))
            if not apart <= allowed:
                raise AdminError(
                    f"the folded model is off by {apart:.2g} of its largest output; at most {allowed:.1g} was "
                    "expected. Keep the model unfolded, and report its class."
                )
    detach(root, stock)
    torch.clear_autocast_cache()
    return model
