"""Attach Admin to a model and fold it into the weights: hooks scale the shortcut of each site.

    LN(x + f(x))   becomes   LN(x + f(x) + (ω - 1) ⊙ x),   ω = omega_init + omega_delta

omega_init is a buffer of the norm; `attach` and `profile` fill it. omega_delta is a parameter that starts at 0, as in
fairseq's layers (`method.norms`), because an optimizer may copy the parameters before there is a batch to profile. With
ω = 1 the model computes the same bits as before. No forward is replaced. The fold gives a stock model that computes the
same function. It multiplies the norm that wrote a shortcut by ω, and divides the weights that read the shortcut by ω
(see `folding`).
"""

from __future__ import annotations

import copy
import logging
import re
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..core.folding import divisible, largest_difference, whole
from ..core.omega import omega_from_depth, omega_range
from ..core.undisturbed import undisturbed
from ..errors import AdminError
from .batch import call
from .channel_flow import tensors
from .sites import GOES_ON, UNRELATED, Site, depth, find_sites, grouped, sums_of
from .trace import Trace

logger = logging.getLogger(__name__)
ATTACHED = "_admin"
"""Attribute of an attached model that stores its `Attached` record."""
OMEGA = ("omega_init", "omega_delta")
OMEGAS, UNFOLDABLE = ("constant", "log", 1), ("refuse", "keep", "skip")
EXPECTED = (GOES_ON, UNRELATED)
"""Reasons for which a norm that reads a sum should be no site."""
WRAPPER = re.compile(r"(_orig_mod|_checkpoint_wrapped_module)\.")
WRAPPED = ("_orig_mod", "device_ids", "unshard", "_fsdp_wrapped_module")
"""Attributes of modules under torch.compile, DDP, DataParallel or FSDP."""
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Largest difference of outputs that a fold may make, as a share of the largest output, or of 1 if that is more."""


@dataclass
class Attached:
    """The record of an attached model."""

    stacks: list[list[Site]]
    """The sites of each stack, in forward order."""
    off: dict[str, str]
    """The norms that read a sum and have no ω, or one that stays 1, and why."""
    layout: dict[str, str] = field(default_factory=dict)
    """For each name of a parameter, the first name of the same parameter. (A tied parameter has several names.)"""
    undo: list[Callable[[], object]] = field(default_factory=list)

    @property
    def sites(self) -> list[Site]:
        return [site for stack in self.stacks for site in stack]

    def forget(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Hook of the model: drop the shortcuts that a failed forward left behind, as after running out of memory."""
        for device in {tensor.device for tensor in tensors([args, kwargs])}:
            for site in self.sites:
                site.shortcuts.pop(device, None)


def attached(model: nn.Module) -> tuple[nn.Module, Attached]:
    """The attached model, which may be inside a wrapper (DDP, torch.compile), and its record.

    Raises:
        AdminError: nothing is attached, or the model holds several models that were attached separately.
    """
    # A wrapper may share the attributes of the module inside.
    roots = {id(vars(module)[ATTACHED]): module for module in model.modules() if ATTACHED in vars(module)}
    if not roots:
        raise AdminError(f"{type(model).__name__} is not attached; call attach(model, batch) first.")
    if len(roots) > 1:
        raise AdminError(f"{type(model).__name__} holds {len(roots)} attached models; give one of them.")
    (root,) = roots.values()
    return root, vars(root)[ATTACHED]


def refuse_trained(sites: list[Site]) -> None:
    """Raise AdminError if a parameter of a norm differs between channels, as after training."""
    for site in sites:
        values = [whole(parameter.detach()) for parameter in site.norm.parameters()]
        if any(value.ne(value.flatten()[0]).any() for value in values):
            raise AdminError(
                f"{site.name} differs between channels: the model has been trained (from_pretrained?), and needs its "
                "omega. Begin with a new model, or attach with omega=1 and do not profile."
            )


def layout(model: nn.Module) -> dict[str, str]:
    """For each name of a parameter, the first name of the same parameter. Names leave out the prefixes of wrappers."""
    first: dict[int, str] = {}
    named = [(WRAPPER.sub("", name), p) for name, p in model.named_parameters(remove_duplicate=False)]
    return {name: first.setdefault(id(parameter), name) for name, parameter in named}


def forget_compiled() -> None:
    """Have torch.compile compile everything in this process again, because it does not notice new or removed hooks.

    There is no narrower way: any compiled function may call the model, and such functions cannot be found from here.
    """
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def watch_first_step(model: nn.Module, attachment: Attached) -> None:
    """Warn at the first step of an optimizer that moves the norm of a site, but not its ω."""
    waiting, root = {site.name for site in attachment.sites if site.learned}, weakref.proxy(model)

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        stepped, still = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}, {}
        for name, norm in root.named_modules() if waiting else ():
            name = WRAPPER.sub("", name)
            if name in waiting and (moved := stepped.intersection(map(id, norm.parameters()))):
                waiting.remove(name)
                if not hasattr(norm, "omega_init"):
                    still[name] = "has been replaced since attach, and its omega with it: replace it before"
                elif norm.omega_delta.requires_grad and id(norm.omega_delta) not in moved:
                    still[name] = "is trained without its omega: make the optimizer after attach, of all parameters"
        if still:
            logger.warning("Admin: %s.", grouped(still))

    weakref.finalize(attachment, register_optimizer_step_post_hook(hook).remove)


def unfoldable(model: nn.Module) -> str:
    """Why an attached model cannot be folded; "" if it can."""
    root, attachment = attached(model)
    kept = {site.name: site.unfoldable for site in attachment.sites if site.unfoldable}
    return f"{type(root).__name__} cannot be folded: {grouped(kept)}" if kept else ""


def report(model: nn.Module, attachment: Attached, omega: object) -> None:
    """Log the sites and their ω, and warn of norms at which Admin is off."""
    stacks = {f"stack of {stack[0].name}": [site.omega[0] for site in stack] for stack in attachment.stacks}
    ranges = "; ".join(omega_range(name, torch.stack(values)) for name, values in stacks.items())
    plural = "s" * (len(attachment.sites) > 1)
    logger.info("Admin: attached to %d site%s, omega=%r: %s", len(attachment.sites), plural, omega, ranges)
    if kept := unfoldable(model):
        logger.warning("Admin: %s", kept)
    for level, expected in ((logging.INFO, True), (logging.WARNING, False)):
        if off := {name: why for name, why in attachment.off.items() if (why in EXPECTED) is expected}:
            logger.log(level, "Admin is off: %s", grouped(off))


def attach(
    model: nn.Module,
    batch: Any,
    *,
    omega: str | int = "constant",
    unfoldable: str = "refuse",
    sites: Iterable[str] | None = None,
) -> nn.Module:
    """Put an ω into every site of a Post-LN model, in place (Liu et al. 2020, section 4.3). Make the optimizer later.

    ω requires a gradient if the norm's weight does. Everything that torch.compile has compiled in this process is
    compiled again.

        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 3)
        >>> model = admin.attach(model, torch.randn(4, 7, 16))
        >>> [round(omega[0].item(), 3) for omega in admin.omegas(model).values()]
        [1.0, 2.449, 2.449, 2.449, 2.449, 2.449]

    Args:
        model: new, and not compiled, wrapped or sharded; in training or evaluation mode.
        batch: the arguments of a forward (see `batch`). It is run once, without gradients, to find the sites.
        omega: "constant", ω² = S in a stack of S sub-layers, or "log", ω² = (S + 1)/ln(S + 1) - 1, both from the
            package admin-torch. 1: the same model bit for bit, for a trained model, or until `profile`.
        unfoldable: if the ω of a site cannot be folded away, "refuse" the model, "keep" that ω and never fold the
            model, or "skip" the site.
        sites: the names of the norms that get an ω. None: all sites.

    Returns:
        The same model. Its ω are factors without a unit.

    Raises:
        AdminError: the model has no site; a site cannot have ω, or its ω cannot be folded away; the model is trained
            and the argument `omega` is not 1; or the model is compiled, wrapped or sharded. The model stays as it was.
    """
    for value, expected, name in ((omega, OMEGAS, "omega"), (unfoldable, UNFOLDABLE, "unfoldable")):
        if value not in expected:
            raise AdminError(f"{name}={value!r}; expected {' or '.join(map(repr, expected))}.")
    for module in model.modules():
        if hasattr(module, "omega_init"):
            raise AdminError(f"{type(model).__name__} is attached already; fold it, or make it again, first.")
        if module._compiled_call_impl or any(hasattr(module, name) for name in WRAPPED):
            raise AdminError(f"{type(module).__name__} is compiled, wrapped or sharded; attach to the model before.")
    attachment = Attached(*find_sites(model, batch, sites and dict.fromkeys(sites), unfoldable))
    if omega != 1:
        refuse_trained(attachment.sites)
    for site, sublayers in [(site, depth(stack)) for stack in attachment.stacks for site in stack]:
        norm, weight = site.norm, next(site.norm.parameters())
        by_depth = omega_from_depth(str(omega), sublayers) if omega != 1 and site.learned else 1
        norm.register_buffer("omega_init", torch.full_like(weight.flatten(), by_depth))
        norm.omega_delta = nn.Parameter(0 * norm.omega_init, weight.requires_grad) if site.learned else 0.0
        attachment.undo += [handle.remove for handle in site.hooks()]
    attachment.undo.append(model.register_forward_pre_hook(attachment.forget, with_kwargs=True).remove)
    # torch's encoders make nested tensors of padded batches, and hooks cannot handle those.
    for encoder in [module for module in model.modules() if getattr(module, "use_nested_tensor", False)]:
        attachment.undo.append(partial(setattr, encoder, "use_nested_tensor", True))
        setattr(encoder, "use_nested_tensor", False)  # noqa: B010
    vars(model)[ATTACHED] = attachment
    attachment.layout = layout(model)
    forget_compiled()
    watch_first_step(model, attachment)
    report(model, attachment, omega)
    return model


def omegas(model: nn.Module) -> dict[str, Tensor]:
    """The ω of every site.

    Args:
        model: an attached model, or a wrapper of one.

    Returns:
        ω by the name of the site's norm, in forward order of each stack. Shape (C,), a factor without a unit.

    Raises:
        AdminError: the model is not attached.
    """
    return {site.name: site.omega for site in attached(model)[1].sites}


def folded_weights(root: nn.Module, attachment: Attached) -> dict[int, Tensor]:
    """The stock model's weights, keyed by the id of the attached model's parameter.

    A weight is float64 if the fold multiplies or divides it by ω.

    Liu et al. 2020, appendix C: the fold multiplies the norm that wrote a shortcut by ω, and divides the weights that
    read the shortcut.
    """
    now = layout(root)
    changed = [name for name in now | attachment.layout if now.get(name) != attachment.layout.get(name)]
    modules = set(root.modules())  # a copy of a norm has the same names, and an omega of its own
    changed += [f"{site.name}.omega_init" for site in attachment.sites if site.norm not in modules]
    if changed := sorted(changed):
        raise AdminError(
            f"{changed[0].rpartition('.')[0]} has changed since attach: {changed[0]} is new, gone, replaced or tied. "
            "Undo that (merge LoRA, remove_parametrizations, prune.remove, put the norm of attach back), then fold."
        )
    if kept := unfoldable(root):
        raise AdminError(f"{kept}. Keep it with its omega.")
    named = [(name, parameter) for name, parameter in root.named_parameters() if not name.endswith(OMEGA)]
    weights = {id(parameter): whole(parameter.detach()).clone() for _, parameter in named}
    for site in [site for site in attachment.sites if site.learned]:
        omega = divisible(site.omega, f"omega of {site.name}", advice="Keep the model unfolded")
        for scalings, factor in ((site.written, omega), (site.readers, 1 / omega)):
            for name, scaling in scalings.items():
                key = id(root.get_parameter(name))
                weights[key] = scaling.scaled(weights[key], factor)
    return weights


def detach(root: nn.Module, weights: Iterable[Tensor]) -> nn.Module:
    """Turn an attached model, or a copy of it, into the stock model with these weights, in place."""
    attachment = vars(root).pop(ATTACHED)
    for undo in attachment.undo:
        undo()
    for site in attachment.sites:
        del site.norm.omega_init, site.norm.omega_delta
    with torch.no_grad():
        for parameter, weight in zip(root.parameters(), weights, strict=True):
            parameter.copy_(weight)
    forget_compiled()
    return root


def folded_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The stock model's state dict. The attached model does not change.

    Args:
        model: an attached model, or a wrapper of one. If it is sharded (FSDP), every rank has to call.

    Returns:
        The state dict of the stock model, with whole weights even if the model is sharded. They have the stock model's
        shapes and types, and are computed in float64 (Liu et al. 2020, appendix C; see `folding`).

    Raises:
        AdminError: the model is not attached, has changed since, or was attached with unfoldable="keep"; an |ω| is too
            small.
    """
    root, attachment = attached(model)
    weights = folded_weights(root, attachment)

    def stock(entry: Any) -> Any:
        return weights[id(entry)].to(entry.dtype) if id(entry) in weights else copy.deepcopy(entry)

    state = root.state_dict(keep_vars=True)
    return {WRAPPER.sub("", key): stock(entry) for key, entry in state.items() if not key.endswith(OMEGA)}


def compare(root: nn.Module, weights: Iterable[Tensor], batch: Any, sites: list[Site]) -> None:
    """Raise AdminError if a model and a copy folded to these weights differ in outputs, in evaluation mode.

    The comparison leaves out inner streams that a model returns (hidden states, mems, sums before a norm), because the
    fold scales them or a term of them.
    """
    with undisturbed(root):
        root.eval()
        before = tensors(call(root, batch))
    # Copied after a forward without gradients: tensors that a module keeps of a training step cannot be copied.
    graph = Trace(detach(copy.deepcopy(root), weights), batch)
    norms = {WRAPPER.sub("", name): norm for name, norm in graph.norms.items()}
    skipped = [site.name for site in sites if site.name not in norms]
    scaled = {norms.get(name.rpartition(".")[0]) for site in sites for name in site.written}
    sums = {total for site in sites if site.name in norms for total in sums_of(norms[site.name])}
    pairs = [
        (old, new)
        for old, new in zip(before, tensors(graph.result), strict=True)
        if new.is_floating_point() and scaled.isdisjoint(graph.value(new).channels) and graph.value(new) not in sums
    ]
    if skipped or not pairs:
        fault = f"a deep copy skips {skipped[0]}" if skipped else f"no floats in a {type(graph.result).__name__}"
        raise AdminError(
            f"{type(root).__name__}: the fold cannot be compared ({fault}). Call fold(model) without a batch, and "
            "compare what the model gives before and after."
        )
    allowed = max(TOLERANCE.get(dtype, torch.finfo(dtype).eps ** 0.5) for dtype in graph.types)  # autocast has several
    for old, new in pairs:
        moved = ~torch.isclose(old, new, rtol=0, atol=0, equal_nan=True)  # leaves out equal entries (a mask's -inf)
        old, new = old[moved], new[moved]
        apart = largest_difference(old, new) / max(1.0, largest_difference(old, torch.zeros_like(old)))
        if not apart <= allowed:
            raise AdminError(
                f"the folded model is off by {apart:.2g} of its largest output; at most {allowed:.1g} was "
                "expected. Keep it unfolded. Does this batch run code that attach's did not? If not, report its class."
            )


def fold(model: nn.Module, batch: Any = None) -> nn.Module:
    """Fold ω into the weights, in place. The result is a stock model without hooks that computes the same function.

        >>> batch = torch.randn(4, 7, 16)
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> model = admin.attach(torch.nn.TransformerEncoder(layer, 3), batch).eval()
        >>> before = model(batch)
        >>> torch.allclose(admin.fold(model, batch)(batch), before, atol=1e-5)
        True

    Args:
        model: an attached model that is not sharded. With DDP, give the module inside, and wrap it again afterwards.
        batch: the arguments of a forward (see `batch`), to check the fold on a copy of the model first. None: no check.

    Returns:
        The model, with the weights of `folded_state_dict` (Liu et al. 2020, appendix C).

    Raises:
        AdminError: see `folded_state_dict`; or the outputs differ by more than rounding. The model stays as it was.
    """
    root, attachment = attached(model)
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise AdminError("DDP holds on to omega; fold the model inside, ddp.module, and wrap that again.")
    if any(hasattr(parameter, "full_tensor") for parameter in root.parameters()):
        raise AdminError("FSDP has this model in shards; load folded_state_dict(model) into a stock one that is whole.")
    weights = folded_weights(root, attachment).values()
    if batch is not None:
        compare(root, weights, batch, attachment.sites)
    detach(root, weights)
    torch.clear_autocast_cache()
    return model
