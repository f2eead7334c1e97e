"""Admin put into a model and folded out of it: hooks that scale the shortcut of each site.

    LN(x + f(x))   becomes   LN(x + f(x) + (ω - 1) ⊙ x),   ω = omega_init + omega_delta

with omega_init, a buffer of the norm that is filled by profiling, and omega_delta, a parameter that starts at 0, as in
fairseq's layers (`method.norms`): an optimizer's own copies of the parameters are made before there is a batch. With
ω = 1 the model computes what it did, bit for bit. No forward is replaced. The fold leaves the stock model with the same
function: the norm that wrote a shortcut writes it ω times as large, and what reads it undoes that (see `folding`).
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

from ..errors import AdminError
from .batch import arguments, call, one_batch
from .folding import divisible, largest_difference, scale, whole
from .omega import omega_from_depth, omega_range
from .reading import tensors
from .sites import GOES_ON, UNRELATED, Site, find_sites, grouped
from .trace import undisturbed

logger = logging.getLogger(__name__)
ATTACHED = "_admin"  # the attribute of an attached model that has what is attached to it
OMEGA = ("omega_init", "omega_delta")
OMEGAS, UNFOLDABLE = ("constant", "log", 1), ("refuse", "keep", "skip")
EXPECTED = (GOES_ON, UNRELATED)  # why a norm that reads a sum is no site, where nothing is amiss
WRAPPER = re.compile(r"(_orig_mod|_checkpoint_wrapped_module)\.")
WRAPPED = ("_orig_mod", "device_ids", "unshard", "_fsdp_wrapped_module")  # has torch.compile, (D)DP, or FSDP
INSIDE = ("hidden_states", "mems")  # what models may give of the streams inside
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}  # of a fold's outputs, as a share of the largest, or of 1


@dataclass
class Attached:
    """What is attached to a model."""

    stacks: list[list[Site]]
    layout: dict[str, str] = field(default_factory=dict)  # of the parameters
    undo: list[Callable[[], object]] = field(default_factory=list)

    @property
    def sites(self) -> list[Site]:
        return [site for stack in self.stacks for site in stack]

    def forget(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Let go of what a forward left that ended with an error (out of memory): a hook of the model."""
        for device in {tensor.device for tensor in tensors([args, kwargs])}:
            for site in self.sites:
                site.shortcuts.pop(device, None)


def depth(stack: list[Site]) -> int:
    """How many sub-layers run in a stack."""
    return sum(site.calls for site in stack)


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
                    "another omega would destroy what it has learned. Begin with a new model, or attach with omega=1 "
                    "and do not profile."
                )


def layout(model: nn.Module) -> dict[str, str]:
    """The first name of each parameter, by all its names, of which some may be tied. Wrappers of layers have none."""
    first: dict[int, str] = {}
    named = [(WRAPPER.sub("", name), p) for name, p in model.named_parameters(remove_duplicate=False)]
    return {name: first.setdefault(id(parameter), name) for name, parameter in named}


def forget_compiled() -> None:
    """Have torch.compile, which does not look for hooks that come or go, compile again."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def watch_first_step(model: nn.Module) -> None:
    """Warn at the first step of an optimizer that has the norms, but not their ω."""
    reference = weakref.ref(model)
    pending = [None]

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        model = reference()
        if model is None or not pending or ATTACHED not in vars(model):
            return
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        parameters = [item for site in vars(model)[ATTACHED].sites for item in site.norm.named_parameters()]
        if keys := {key for key, parameter in parameters if id(parameter) in stepped}:
            pending.clear()
            if keys.isdisjoint(OMEGA):
                logger.warning("Admin: this optimizer does not move omega: it was made before attach. Make it after.")

    weakref.finalize(model, register_optimizer_step_post_hook(hook).remove)


def report(stacks: list[list[Site]], omega: object, reasons: dict[str, str]) -> None:
    """Log what was attached, and warn of norms at which Admin is off."""
    sites = [site for stack in stacks for site in stack]
    ranges = [
        omega_range(f"stack of {stack[0].name}", torch.tensor([site.omega[0] for site in stack])) for stack in stacks
    ]
    logger.info("Admin: attached to %d sites, omega=%r: %s", len(sites), omega, "; ".join(ranges))
    off = {stack[0].name: "is alone in its stack, so omega is 1" for stack in stacks if depth(stack) == 1}
    later = [site for stack in stacks for site in stack[1:]]
    off |= {site.name: "keeps omega 1: no norm wrote its shortcut as it is" for site in later if not site.learned}
    kept = {site.name: f"{site.unfoldable}: the model cannot be folded" for site in sites if site.unfoldable}
    for level, facts in (
        (logging.INFO, {name: reason for name, reason in reasons.items() if reason in EXPECTED}),
        (logging.WARNING, {name: f"is no site: it {why}" for name, why in reasons.items() if why not in EXPECTED}),
        (logging.WARNING, off | kept),
    ):
        if facts:
            logger.log(level, "Admin: %s", grouped(facts))


@one_batch
def attach(
    model: nn.Module,
    batch: Any,
    *,
    omega: str | int = "constant",
    unfoldable: str = "refuse",
    sites: Iterable[str] | None = None,
) -> nn.Module:
    """Put an ω into every site of a Post-LN model, in place. Call it before the optimizer is made.

    ω is learned where the site's norm is.

    Args:
        batch: what a forward of the model takes (see `batch`); used once, without gradients, to find the sites.
        omega: "constant" or "log": from each stack's depth. 1: the same model, bit for bit, as for one that has been
            trained, or until `profile` sets ω.
        unfoldable: what to do where ω could not be folded away: "refuse" the model, "keep" ω and never fold the model,
            or "skip" such sites.
        sites: the names of the norms that are to have ω, if not all that can be found.

    Raises:
        AdminError: no site, one that cannot have ω or not be folded; a trained model, unless omega is 1; compiled,
            wrapped, sharded. The model is as it was.
    """
    for value, expected, name in ((omega, OMEGAS, "omega"), (unfoldable, UNFOLDABLE, "unfoldable")):
        if value not in expected:
            raise AdminError(f"{name}={value!r}; expected {' or '.join(map(repr, expected))}.")
    for module in model.modules():
        if ATTACHED in vars(module):
            raise AdminError(f"{type(model).__name__} is attached already; fold it, or make it again, first.")
        if module._compiled_call_impl or any(hasattr(module, name) for name in WRAPPED):  # takes no notice of it
            raise AdminError(f"{type(module).__name__} is compiled, wrapped or sharded; attach to the model before.")
    every = [*model.parameters(), *model.buffers(), *tensors(arguments(batch))]
    if any(tensor.is_meta for tensor in every):
        raise AdminError(f"{type(model).__name__} or its batch is on the meta device; give both numbers before attach.")
    if torch.is_inference_mode_enabled() or any(tensor.is_inference() for tensor in every):
        raise AdminError("attach cannot follow tensors of torch.inference_mode; make model and batch without it.")
    stacks, reasons = find_sites(model, batch, sites, unfoldable)
    attachment = Attached(stacks)
    if omega != 1:
        refuse_trained(attachment.sites)
    for site, sublayers in [(site, depth(stack)) for stack in stacks for site in stack]:
        norm, like = site.norm, next(site.norm.parameters())
        norm.register_buffer("omega_init", torch.ones_like(like))
        norm.omega_delta = nn.Parameter(torch.zeros_like(like), like.requires_grad) if site.learned else 0.0
        if omega != 1:
            site.set_omega(omega_from_depth(str(omega), sublayers))
        attachment.undo += [handle.remove for handle in site.hooks()]
    attachment.undo.append(model.register_forward_pre_hook(attachment.forget, with_kwargs=True).remove)
    # torch's encoders make nested tensors of padded batches, through which hooks do not see.
    for encoder in [module for module in model.modules() if getattr(module, "use_nested_tensor", False)]:
        attachment.undo.append(partial(setattr, encoder, "use_nested_tensor", True))
        setattr(encoder, "use_nested_tensor", False)  # noqa: B010
    vars(model)[ATTACHED] = attachment
    attachment.layout = layout(model)
    forget_compiled()
    watch_first_step(model)
    report(stacks, omega, reasons)
    return model


def omegas(model: nn.Module) -> dict[str, Tensor]:
    """ω of every site of an attached model, shape (C,), by the name of its norm, in forward order of each stack."""
    return {site.name: site.omega for site in attached(model)[1].sites}


def unfoldable(model: nn.Module) -> str:
    """Why an attached model cannot be folded; "" if it can."""
    root, attachment = attached(model)
    kept = {site.name: site.unfoldable for site in attachment.sites if site.unfoldable}
    return f"{type(root).__name__} cannot be folded: {grouped(kept)}" if kept else ""


def detach(model: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """Make an attached model the stock one again, in place, with these weights."""
    root, attachment = attached(model)
    for undo in attachment.undo:
        undo()
    for site in attachment.sites:
        del site.norm.omega_init, site.norm.omega_delta
    del vars(root)[ATTACHED]
    root.load_state_dict(weights)
    forget_compiled()
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
    now = layout(root)
    if changed := sorted(name for name in now | attachment.layout if now.get(name) != attachment.layout.get(name)):
        raise AdminError(
            f"{changed[0].rpartition('.')[0]} has changed since attach: {changed[0]} is new, gone, or tied. "
            "Take off what was put on (merge LoRA, remove_parametrizations, prune.remove), then fold."
        )
    if kept := unfoldable(root):
        raise AdminError(f"{kept}. Keep it with its omega.")
    weights = {id(parameter): whole(parameter.detach()).clone() for parameter in root.parameters()}
    for site in [site for site in attachment.sites if site.learned]:
        omega = divisible(site.omega, f"omega of {site.name}", advice="Keep the model unfolded")
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


def outputs(model: nn.Module, batch: Any, writers: set[str]) -> tuple[list[Tensor], list[bool], set[torch.dtype]]:
    """What a model computes in evaluation mode, without hidden states; which are a writer's output; in which types.

    Raises:
        AdminError: no tensor is found in what it gives.
    """
    types: set[torch.dtype] = set()
    streams: list[Tensor] = []  # which the fold scales

    def look(module: nn.Module, args: tuple, made: object) -> None:
        types.update(t.dtype for t in tensors(made) if t.is_floating_point())
        streams.extend(tensors(made) if module in scaled else ())

    scaled = {model.get_submodule(name) for name in writers}
    with undisturbed(model) as undo:
        model.eval()
        for module in model.modules():
            undo.callback(module.register_forward_hook(look).remove)
        result = call(model, batch)
    shown = [result[key] for key in result if not key.endswith(INSIDE)] if isinstance(result, dict) else result
    every = list(filter(torch.is_floating_point, tensors(shown)))
    places = {stream.untyped_storage().data_ptr() for stream in streams}
    repeated = [tensor.untyped_storage().data_ptr() in places for tensor in every]
    if all(repeated):
        raise AdminError(
            f"{type(model).__name__} gives a {type(result).__name__}, in which no tensor is found to compare. Call "
            "fold(model) without a batch, and compare what it gives before and after."
        )
    return every, repeated, types


@one_batch
def fold(model: nn.Module, batch: Any = None) -> nn.Module:
    """Make the stock model of an attached one, in place: no ω, no hook, the same function.

    Args:
        batch: what a forward takes (see `batch`), if the fold is to be checked on it first, with a copy of the model.

    Raises:
        AdminError: an entry of ω is too near to 0, or the outputs differ. The model is as it was.
    """
    root, attachment = attached(model)
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise AdminError("DDP holds on to omega; fold the model inside, ddp.module, and wrap that again.")
    if any(hasattr(parameter, "full_tensor") for parameter in root.parameters()):
        raise AdminError("FSDP has this model in shards; load folded_state_dict(model) into a stock one that is whole.")
    stock = folded_state_dict(root)
    if batch is not None:
        writers = {site.writer for site in attachment.sites if site.writer}
        before, repeated, types = outputs(root, batch, writers)
        after, _, _ = outputs(detach(copy.deepcopy(root), stock), batch, set())
        allowed = max(TOLERANCE.get(dtype, torch.finfo(dtype).eps ** 0.5) for dtype in types)  # autocast has several
        for old, new in [pair for *pair, stream in zip(before, after, repeated, strict=True) if not stream]:
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
