"""Attach Admin to a model and fold it into the weights: hooks divide the branch of each sub-layer by ω.

    LN(ω x + f(x))   is   LN(x + f(x) / ω)     up to the norm's eps

ω is one number, a buffer of the module that returns the branch. `branches` finds that module, and the weights to which
the branch is proportional: the fold divides them by ω. With ω = 1 the model computes the same bits as before. No
forward is replaced, and there is no parameter more.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from ..core.omega import omega_from_depth
from ..errors import AdminError
from .branches import Search, Writer, grouped, stacks_of
from .trace import Graph, leaf_of, tensors, with_leaf
from .trial import try_writers

logger = logging.getLogger(__name__)
ATTACHED, OMEGA = "_admin", "admin_omega"
"""Attribute of an attached model that stores its `Attached` record; the name of the buffer ω."""
OLD = "omega_delta"
"""Ending of keys in state dicts of 0.3.0, whose ω are vectors at the shortcut."""
RULES, UNFOLDABLE = ("constant", "log", "linear"), ("refuse", "keep", "skip")
WRAPPER = re.compile(r"(_orig_mod|_checkpoint_wrapped_module)\.")
WRAPPED = ("_orig_mod", "device_ids", "unshard", "_fsdp_wrapped_module")
"""Attributes of modules under torch.compile, DDP, DataParallel or FSDP."""
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Largest difference of outputs that a fold may make, as a share of the largest output, or of 1 if that is more."""


def divide(place: int, module: Any, args: Any, output: Any) -> Any:
    """Hook of a module that returns a branch: divide it by ω."""
    return with_leaf(output, place, leaf_of(output, place) / module.admin_omega)


divider = functools.cache(partial(partial, divide))
"""The hook for a branch in a place. It is one object for all modules, so torch.compile compiles alike layers once."""


class Division(nn.Module):
    """Parametrisation of a weight that writes a branch, if no module returns that branch: divide the weight by ω."""

    admin_omega: Tensor

    def forward(self, weight: Tensor) -> Tensor:
        return weight / self.admin_omega


@dataclass
class Weight:
    """A parameter that the fold divides by ω."""

    name: str
    owner: nn.Module
    key: str
    """Its name in its owner."""
    parent: nn.Module
    """The module around its owner, or the model."""
    names: int
    """The number of its names in the model. (A tied parameter has several.)"""

    @property
    def division(self) -> Any:
        """torch's list of parametrisations of this weight, if that is a `Division` alone."""
        divisions: Any = getattr(self.owner, "parametrizations", {})
        found = divisions[self.key] if self.key in divisions else ()
        return found if [type(division) for division in found] == [Division] else None

    @property
    def parameter(self) -> Any:
        """The parameter; None if it is none any more, as under weight_norm."""
        return self.division.original if self.division else self.owner._parameters.get(self.key)


@dataclass
class Branch:
    """A place where branches are divided by ω (see `branches.Writer`)."""

    name: str
    module: Any
    """The module that returns the branch, or the owner of the weight that writes it."""
    place: int | None
    weights: list[Weight]
    unfoldable: str
    handle: Any = None

    @property
    def holder(self) -> Any:
        """The module whose buffer is ω."""
        return self.weights[0].division[0] if self.place is None else self.module

    def put_on(self, omega: Tensor) -> None:
        """Divide the branch by ω from now on."""
        holder = Division() if self.place is None else self.module
        holder.register_buffer(OMEGA, omega)
        if self.place is None:
            parametrize.register_parametrization(self.module, self.weights[0].key, holder)
        else:
            self.handle = self.module.register_forward_hook(divider(self.place))

    def take_off(self) -> Tensor:
        """Divide the branch no longer. Returns ω."""
        omega: Tensor = self.holder.admin_omega
        if self.place is None:  # torch's remove_parametrizations changes the class, which deep copies share
            key, lists = self.weights[0].key, self.module.parametrizations
            self.module._parameters[key] = lists[key].original
            del lists[key]
            if not lists:
                del self.module.parametrizations
                self.module.__class__ = type(self.module).__bases__[0]
        else:
            self.handle.remove()
            del self.module.admin_omega
        return omega


@dataclass
class Attached:
    """The record of an attached model."""

    branches: list[Branch]
    stacks: dict[str, int]
    """The number of sub-layers of each stack, by the name of its first norm."""
    norms: list[str]
    """The names of the modules that normalise the sums."""
    off: dict[str, str]
    """The norms that read a sum and get no ω, and why."""
    undo: list[Callable[[], object]] = field(default_factory=list)

    @property
    def weights(self) -> list[Weight]:
        return [weight for branch in self.branches for weight in branch.weights]

    def put_on(self, model: nn.Module, omegas: Iterable[Tensor]) -> None:
        """Divide the branches of a model by ω from now on, and watch what writes them."""
        for branch, omega in zip(self.branches, omegas):
            branch.put_on(omega)
        self.undo = [
            model.register_forward_pre_hook(check_unchanged).remove,
            model.register_load_state_dict_pre_hook(refuse_old).remove,
        ]
        # torch's encoders make nested tensors of padded batches, and hooks cannot handle those.
        for encoder in [module for module in model.modules() if getattr(module, "use_nested_tensor", False)]:
            self.undo.append(partial(setattr, encoder, "use_nested_tensor", True))
            setattr(encoder, "use_nested_tensor", False)  # noqa: B010
        vars(model)[ATTACHED] = self
        forget_compiled()

    def take_off(self, model: nn.Module) -> list[Tensor]:
        """Divide the branches no longer. Returns their ω."""
        omegas = [branch.take_off() for branch in self.branches]
        for undo in self.undo:
            undo()
        del vars(model)[ATTACHED]
        forget_compiled()
        return omegas

    def scales(self, omegas: Iterable[Any]) -> dict[int, Any]:
        """The ω of each parameter that writes a branch, by the parameter's id.

        Raises:
            AdminError: a parameter writes branches with two ω.
        """
        scales: dict[int, Any] = {}
        for branch, omega in zip(self.branches, omegas):
            for weight in branch.weights:
                if scales.setdefault(id(weight.parameter), omega) != omega:
                    raise AdminError(f"{weight.name} writes branches with two omega. Give attach a number for omega.")
        return scales


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


def whole(tensor: Any) -> Any:
    """The whole of a tensor that FSDP has in shards: every rank has to call this. Other tensors are returned as is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def names_of(model: nn.Module, parameter: Any) -> list[str]:
    """The names of a parameter in a model. (A tied one has several.)"""
    return [name for name, other in model.named_parameters(remove_duplicate=False) if other is parameter]


def check_unchanged(root: nn.Module, *_: Any) -> None:
    """Hook of the model: raise AdminError if what writes a branch was replaced, wrapped or re-parametrised."""
    if torch.compiler.is_compiling() or getattr(root, "_is_replica", False):  # of DataParallel
        return
    attachment, modules = vars(root)[ATTACHED], {*root.modules()}
    changed = [branch.name for branch in attachment.branches if branch.module not in modules]
    for weight in attachment.weights:
        here = weight.owner in (*weight.parent._modules.values(), root) and weight.parent in modules
        changed += [] if here and weight.parameter is not None else [weight.name]
    if changed:
        raise AdminError(
            f"{changed[0]} has changed since attach: it was replaced, wrapped or re-parametrised, and omega does not "
            "reach that. Undo it (merge LoRA, remove_parametrizations, prune.remove), or do it before attach."
        )


def refuse_old(model: nn.Module, state: dict[str, Any], *_: Any) -> None:
    """Hook of load_state_dict: name state dicts of 0.3.0."""
    if old := [key for key in state if key.endswith(OLD)]:
        raise AdminError(
            f"{old[0]}: a state dict of version 0.3.0, whose omega are vectors at the shortcut. Fold it with 0.3.0, "
            "and attach to the folded model with keep_function=True."
        )


def forget_compiled() -> None:
    """Have torch.compile compile everything in this process again, because it does not notice new or removed hooks.

    There is no narrower way: any compiled function may call the model, and such functions cannot be found from here.
    """
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def refuse_arguments(model: nn.Module, omega: Any, unfoldable: str) -> None:
    """Raise AdminError for an unknown option, and for a model that is attached, compiled, wrapped or sharded."""
    if omega not in RULES and not (isinstance(omega, (int, float)) and 0 < omega < math.inf):
        raise AdminError(f"omega={omega!r}; expected {', '.join(map(repr, RULES))} or a number above 0.")
    if unfoldable not in UNFOLDABLE:
        raise AdminError(f"unfoldable={unfoldable!r}; expected {' or '.join(map(repr, UNFOLDABLE))}.")
    for module in model.modules():
        if OMEGA in module._buffers:
            raise AdminError(f"{type(model).__name__} is attached already; fold it, or make it again, first.")
        if module._compiled_call_impl or any(hasattr(module, name) for name in WRAPPED):
            raise AdminError(f"{type(module).__name__} is compiled, wrapped or sharded; attach to the model before.")


def refuse_trained(model: nn.Module, norms: Iterable[str]) -> None:
    """Raise AdminError if a parameter of a norm differs between channels, as after training."""
    for name in norms:
        for value in [whole(parameter.detach()) for parameter in model.get_submodule(name).parameters(recurse=False)]:
            if value.numel() == max(value.shape, default=0) and value.ne(value.flatten()[0]).any():
                raise AdminError(
                    f"{name} differs between channels: the model has been trained (from_pretrained?). Begin with a new "
                    "model, or give keep_function=True to go on with the function of this one."
                )


def choose(search: Search, writers: list[Writer], unfoldable: str) -> list[Writer]:
    """The writers to attach to. Takes the sub-layers that are skipped out of `search`.

    Raises:
        AdminError: the ω of one cannot be folded away, and `unfoldable` does not allow that; or there is none.
    """
    kind = type(search.graph.model).__name__
    reasons = {sublayer.name: w.unfoldable for w in writers if w.unfoldable for sublayer in w.sublayers}
    nowhere = any(writer.place == -1 for writer in writers)
    if reasons and (unfoldable == "refuse" or unfoldable == "keep" and nowhere):
        keep = "" if nowhere else 'unfoldable="keep" trains them with an omega that cannot be folded away, '
        raise AdminError(f'{kind}: {grouped(reasons)}. {keep}unfoldable="skip" gives them none.')
    if unfoldable == "skip":
        search.off |= reasons
        skipped = [sublayer for sublayer in search.sublayers if sublayer.name in reasons]
        for sublayer in skipped:  # grows, because a writer may serve several sub-layers
            dropped = [writer for writer in writers if sublayer in writer.sublayers]
            skipped += [other for writer in dropped for other in writer.sublayers if other not in skipped]
            writers = [writer for writer in writers if writer not in dropped]
        search.sublayers = [sublayer for sublayer in search.sublayers if sublayer not in skipped]
    if not writers:
        why = grouped(search.off) or "It has no norm that reads a sum"
        raise AdminError(f"{kind}: no sum x + f(x) that only a norm reads. {why}. Admin is for Post-LN.")
    return writers


def unfoldable(model: nn.Module) -> str:
    """Why an attached model cannot be folded; "" if it can."""
    root, attachment = attached(model)
    kept = {branch.name: branch.unfoldable for branch in attachment.branches if branch.unfoldable}
    return f"{type(root).__name__} cannot be folded: {grouped(kept)}" if kept else ""


def report(model: nn.Module, attachment: Attached, quiet: set[str], omega: Any) -> None:
    """Log the stacks and their ω, and warn of norms at which Admin is off."""
    stacks = [
        f"stack of {name}: {depth} sub-layer{'s' * (depth > 1)}, omega {omega_from_depth(str(omega), depth):.3f}"
        for name, depth in attachment.stacks.items()
    ]
    logger.info("Admin: attached, omega=%r: %s", omega, "; ".join(stacks))
    if kept := unfoldable(model):
        logger.warning("Admin: %s", kept)
    for level in (logging.INFO, logging.WARNING):
        if off := {name: why for name, why in attachment.off.items() if (name in quiet) is (level == logging.INFO)}:
            logger.log(level, "Admin is off: %s", grouped(off))


def attach(
    model: nn.Module, batch: Any, *, omega: str | float = "constant", unfoldable: str = "refuse",
    keep_function: bool = False,
) -> nn.Module:  # fmt: skip
    """Divide the branch of every sub-layer of a Post-LN model by an ω, in place (Liu et al. 2020, section 4.3).

        LN(ω x + f(x))   is   LN(x + f(x) / ω)     up to the norm's eps

    ω is a number and is not trained; the paper's ω, a trained vector, is in this package's models of fairseq.
    Everything that torch.compile has compiled in this process is compiled again.

        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 3)
        >>> model = admin.attach(model, torch.randn(4, 7, 16))
        >>> [round(omega.item(), 3) for omega in admin.omegas(model).values()]
        [2.449, 2.449, 2.449, 2.449, 2.449, 2.449]

    Args:
        model: new, and not compiled, wrapped or sharded; in training or evaluation mode.
        batch: the arguments of a forward (see `batch`). It is run without gradients: once in evaluation mode to find
            the sub-layers, twice in training mode to see what can be folded.
        omega: a rule of `omega_from_depth`, for a stack of S sub-layers, or a number. 1: the same model bit for bit.
        unfoldable: if the ω of a branch cannot be folded away, "refuse" the model, "keep" that ω and never fold the
            model, or "skip" the sub-layer.
        keep_function: multiply the weights that write the branches by ω first, so that the model computes the same
            function as before. For a model that is trained, or was folded.

    Returns:
        The same model. Its ω are factors without a unit.

    Raises:
        AdminError: the model has no sub-layer; one cannot have ω, or its ω cannot be folded away; the model is trained,
            ω is not 1 and `keep_function` is not set; or it is compiled, wrapped or sharded. The model stays as it was.
    """
    refuse_arguments(model, omega, unfoldable)
    search = Search(Graph(model, batch))
    found = search.writers()
    try_writers(model, batch, found)
    writers = choose(search, found, unfoldable)
    stacks = stacks_of(search.sublayers)
    depths = {sublayer: len(stack) for stack in stacks for sublayer in stack}
    norms = list(dict.fromkeys(sublayer.name for sublayer in depths))
    if omega != 1 and not keep_function:
        refuse_trained(model, norms)
    alone = [stack[0].name for stack in stacks if len(stack) == 1 and omega in RULES]
    off = search.off | search.idle() | dict.fromkeys(alone, "is alone in its stack, so its omega is about 1")
    # A model may call a stack several times. What several stacks share has the ω of the deepest.
    deepest = {stack[0].name: max(len(other) for other in stacks if other[0].name == stack[0].name) for stack in stacks}
    attachment = Attached([], deepest, norms, off)
    omegas = []
    for writer in writers:
        weights = [weight_of(model, name) for name in writer.weights]
        module = weights[0].owner if writer.place is None else model.get_submodule(writer.name)
        attachment.branches.append(Branch(writer.name, module, writer.place, weights, writer.unfoldable))
        omegas.append(max(omega_from_depth(str(omega), depths[sublayer]) for sublayer in writer.sublayers))
    scales, like = attachment.scales(omegas), next(model.parameters())
    with torch.no_grad():
        for parameter in model.parameters() if keep_function else ():
            parameter.mul_(scales.get(id(parameter), 1.0))
    options: Any = {"dtype": torch.promote_types(like.dtype, torch.float32), "device": like.device}
    attachment.put_on(model, [torch.tensor(value, **options) for value in omegas])
    report(model, attachment, search.quiet, omega)
    return model


def weight_of(model: nn.Module, name: str) -> Weight:
    """A parameter that the fold divides, by its name."""
    path, _, key = name.rpartition(".")
    owner, parent = model.get_submodule(path), model.get_submodule(path.rpartition(".")[0])
    return Weight(name, owner, key, parent, len(names_of(model, owner._parameters[key])))


def omegas(model: nn.Module) -> dict[str, Tensor]:
    """The ω of every branch.

    Args:
        model: an attached model, or a wrapper of one.

    Returns:
        ω by the name of the module that returns the branch, or of the parameter that writes it. Numbers, of shape ().

    Raises:
        AdminError: the model is not attached.
    """
    return {branch.name: branch.holder.admin_omega for branch in attached(model)[1].branches}


def omega_range(model: nn.Module) -> dict[str, float]:
    """The smallest and the largest ω of an attached model, for logs."""
    values = [omega.item() for omega in omegas(model).values()]
    return {"omega_min": min(values), "omega_max": max(values)}


def folded_weights(root: nn.Module, attachment: Attached) -> dict[int, Tensor]:
    """The stock model's weights that differ from the attached model's, float64, by the id of the parameter.

    Raises:
        AdminError: the model has changed since attach, or cannot be folded.
    """
    check_unchanged(root)
    for weight in attachment.weights:
        if len(names := names_of(root, weight.parameter)) != weight.names:
            raise AdminError(f"{weight.name} has changed since attach: it is tied, {' and '.join(names)}. Untie it.")
    if kept := unfoldable(root):
        raise AdminError(f"{kept}. Keep it with its omega.")
    scales = attachment.scales(omega.item() for omega in omegas(root).values())
    parameters = {id(weight.parameter): whole(weight.parameter.detach()) for weight in attachment.weights}
    return {key: parameter.double() / scales[key] for key, parameter in parameters.items()}


def folded_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The stock model's state dict. The attached model does not change.

    Args:
        model: an attached model, or a wrapper of one. If it is sharded (FSDP), every rank has to call.

    Returns:
        The state dict of the stock model, with whole weights even if the model is sharded. They have the stock model's
        shapes and types; those that write branches are divided in float64.

    Raises:
        AdminError: the model is not attached, has changed since, or was attached with unfoldable="keep".
    """
    root, attachment = attached(model)
    weights = folded_weights(root, attachment)
    keys = {id(weight.parameter): weight.key for weight in attachment.weights if weight.division}
    stock = {}
    for name, entry in root.state_dict(keep_vars=True).items():
        if id(entry) in keys:
            name = name.replace(f"parametrizations.{keys[id(entry)]}.original", keys[id(entry)])
        value = whole(entry.detach()).clone() if isinstance(entry, Tensor) else copy.deepcopy(entry)
        if not name.endswith(OMEGA):
            stock[WRAPPER.sub("", name)] = weights[id(entry)].to(value.dtype) if id(entry) in weights else value
    return stock


def compare(name: str, before: Graph, after: Graph) -> None:
    """Raise AdminError if the outputs of a model and of the folded model differ."""
    pairs = list(zip(tensors(before.result), tensors(after.result), strict=True))
    pairs = [(old, new) for old, new in pairs if new.is_floating_point()]
    if not pairs:
        raise AdminError(
            f"{name}: the fold cannot be compared (no floats in a {type(after.result).__name__}). Call fold(model) "
            "without a batch, and compare what the model gives before and after."
        )
    types = {value.dtype for value in after.values if value.dtype.is_floating_point}  # autocast has several
    allowed = max(TOLERANCE.get(dtype, torch.finfo(dtype).eps ** 0.5) for dtype in types)
    for old, new in pairs:
        moved = ~torch.isclose(old, new, rtol=0, atol=0, equal_nan=True)  # leaves out equal entries (a mask's -inf)
        old, new = old[moved], new[moved]
        apart = ((old - new).abs().max() / old.abs().max().clamp(min=1.0)).item() if old.numel() else 0.0
        if not apart <= allowed:  # NaN is not
            raise AdminError(
                f"{name}: the folded model is off by {apart:.2g} of its largest output; at most {allowed:.1g} was "
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
        batch: the arguments of a forward (see `batch`), to compare all outputs before and after. None: no check.

    Returns:
        The model, with the weights of `folded_state_dict`.

    Raises:
        AdminError: see `folded_state_dict`; or the outputs differ by more than rounding. The model stays as it was.
    """
    root, attachment = attached(model)
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise AdminError("DDP holds on to omega; fold the model inside, ddp.module, and wrap that again.")
    if any(hasattr(parameter, "full_tensor") for parameter in root.parameters()):
        raise AdminError("FSDP has this model in shards; load folded_state_dict(model) into a stock one that is whole.")
    folded = folded_weights(root, attachment)
    before = Graph(root, batch) if batch is not None else None
    parameters = {id(weight.parameter): weight.parameter for weight in attachment.weights}
    kept = {key: parameter.detach().clone() for key, parameter in parameters.items()}
    omegas = attachment.take_off(root)
    try:
        for key, parameter in parameters.items():
            parameter.data.copy_(folded[key])
        if before is not None:
            compare(type(root).__name__, before, Graph(root, batch))
    except BaseException:
        for key, parameter in parameters.items():
            parameter.data.copy_(kept[key])
        attachment.put_on(root, omegas)
        raise
    torch.clear_autocast_cache()
    return model
