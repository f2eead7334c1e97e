"""What a checkpoint says of its model's, task's and criterion's options, and the options of a stock model like it."""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY
from omegaconf import OmegaConf

from ..architectures.config import fill_sizes, flat_decoder
from ..errors import AdminError
from ..method.schemes import SCHEMES

ARCH = "transformer_wmt_en_de"
"""The architecture of a stock model; every size stands beside it, so the name sets none."""

LM_ARCH = "transformer_lm"
"""The same for a language model, and the name of fairseq's own."""

OURS = {"transformer_admin": ARCH, "transformer_lm_admin": LM_ARCH}
"""Our models, each with the architecture of the stock model that it folds to."""

DEFAULTS = {
    **{f"max_{side}_positions": 1024 for side in ("source", "target")},
    **{f"{stack}_layerdrop": 0 for stack in ("encoder", "decoder")},
    "relu_dropout": 0,
}
"""What fairseq takes where a checkpoint, of hydra or of an older fairseq, has nothing."""


class Stored(NamedTuple):
    """The options in a checkpoint; each part names its kind under `_name`."""

    model: dict[str, Any]
    task: dict[str, Any]
    criterion: dict[str, Any]


def stored(state: Mapping[str, Any]) -> Stored:
    """The options as they lie in a checkpoint, of fairseq's before or after 0.10, of its command line or of hydra.

    Raises:
        AdminError: there are none.
    """
    args, cfg = state.get("args"), state.get("cfg")
    if args is not None:
        flat = dict(vars(args))
        return Stored(*({**flat, "_name": flat.get(kind)} for kind in ("arch", "task", "criterion")))
    if cfg is None:
        raise AdminError(
            "the checkpoint has neither 'cfg' nor 'args', which tell the model's sizes. Use fairseq-train's own."
        )
    return Stored(*(_plain(cfg.get(kind)) for kind in Stored._fields))


def _plain(section: Any) -> dict[str, Any]:
    """A section of fairseq's configuration, of whatever kind, as a dict of plain values."""
    if section is None:
        return {}
    if isinstance(section, Namespace):
        return dict(vars(section))
    if OmegaConf.is_config(section):
        return dict(OmegaConf.to_container(section, resolve=True, enum_to_str=True))  # type: ignore[arg-type]
    return dict(section)


def scheme(model: Mapping[str, Any]) -> str:
    """The scheme of a model of ours by its options, which before there was a choice did not tell."""
    return model.get("admin_scheme") or "admin"


def kind(model: Mapping[str, Any]) -> str | None:
    """The registered model that a model's options are of; None: this fairseq does not know it."""
    return ARCH_MODEL_NAME_REGISTRY.get(model.get("_name"))


def stacks(model: Mapping[str, Any]) -> tuple[str, ...]:
    """The stacks of a model, by its options: a language model has a decoder only."""
    return ("decoder",) if kind(model) in (LM_ARCH, "transformer_lm_admin") else ("encoder", "decoder")


def complete(state: Mapping[str, Any]) -> Namespace:
    """The model's options, with the sizes that it was trained with by its --arch alone.

    Raises:
        AdminError: the architecture is unknown.
    """
    args = Namespace(**stored(state).model)
    if args._name not in ARCH_CONFIG_REGISTRY:
        raise AdminError(
            f"the checkpoint's architecture is {args._name}, which this fairseq does not know. Use the fairseq, or the "
            "--user-dir, it was trained with."
        )
    ARCH_CONFIG_REGISTRY[args._name](args)
    if "encoder" not in stacks(vars(args)):
        return flat_decoder(args)
    fill_sizes(args)
    return args


def stock(state: Mapping[str, Any], layers: Mapping[str, int]) -> OrderedDict[str, Any]:
    """The options of a stock Transformer, or language model, of a checkpoint's sizes, as the entry `args` of its own.

    Args:
        state: the checkpoint of an Admin model, or of a stock one.
        layers: how many layers each of its stacks has.
    """
    found = stored(state)
    arch, task = (ARCH, "translation") if "encoder" in stacks(found.model) else (LM_ARCH, "language_modeling")
    model = vars(complete(state))
    flat = {**found.criterion, **found.task, **model}
    flat.update(arch=arch, _name=arch, task=found.task.get("_name") or task)
    flat.update(criterion=found.criterion.get("_name"))
    for name in [name for name in flat if name.startswith("admin_") or name == "update_freq"]:
        del flat[name]
    if kind(found.model) in OURS:
        for stack, place in zip(("encoder", "decoder"), SCHEMES[scheme(found.model)].norm):
            flat[f"{stack}_normalize_before"] = place == "before"
    for stack, count in layers.items():
        # Of a model pruned with --encoder-layers-to-keep the file holds what was kept; its embeddings are in the file.
        flat.update({f"{stack}_layers": count, f"{stack}_layers_to_keep": None, f"{stack}_embed_path": None})
    args = Namespace(**flat)
    ARCH_CONFIG_REGISTRY[arch](args)
    for name, default in DEFAULTS.items() if arch == ARCH else ():
        if getattr(args, name, None) is None:
            setattr(args, name, default)
    return attributes(vars(args))


def attributes(flat: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Options as a mapping that has them as attributes too.

    fairseq and CTranslate2 read a checkpoint's `args` as an argparse.Namespace, which torch's safe loader (the default
    since torch 2.6) refuses. An OrderedDict it takes, with its attributes.
    """
    result: OrderedDict[str, Any] = OrderedDict(sorted(flat.items()))
    result.__dict__.update(flat)
    return result
