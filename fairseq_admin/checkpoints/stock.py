"""The options of a stock Transformer, or language model, of the same sizes as a checkpoint's model."""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from fairseq.models import ARCH_CONFIG_REGISTRY

from .checkpoint import OURS, Checkpoint

ARCH = "transformer_wmt_en_de"
"""The architecture of a stock model; every size is given with it, so its name sets none."""

LM_ARCH = "transformer_lm"
"""The same for a language model."""

DEFAULTS = {
    **{f"max_{side}_positions": 1024 for side in ("source", "target")},
    **{f"{stack}_layerdrop": 0 for stack in ("encoder", "decoder")},
    "relu_dropout": 0,
}
"""What fairseq assumes where a checkpoint, by hydra or an older fairseq, has nothing."""


def max_positions(checkpoint: Checkpoint, stack: str) -> int:
    """How many positions a stack takes."""
    side = {"encoder": "source", "decoder": "target"}[stack]
    options = checkpoint.options
    return options.model.get(f"max_{side}_positions") or options.task.get("tokens_per_sample") or 1024


def stock_options(checkpoint: Checkpoint, **changed: Any) -> OrderedDict[str, Any]:
    """The options of a stock model of the sizes that a checkpoint's model has, as the entry `args` of its own.

    Args:
        checkpoint: of an Admin model or a stock one, for translation or language modelling.
        changed: options that the stock model has otherwise.
    """
    options = checkpoint.options
    arch, task = (ARCH, "translation") if "encoder" in checkpoint.stacks else (LM_ARCH, "language_modeling")
    flat = {**options.criterion, **options.task, **vars(checkpoint.arguments)}
    flat.update(arch=arch, _name=arch, task=options.task.get("_name") or task, **changed)
    # fairseq-validate builds the criterion by the name in the file; ours is not in stock fairseq.
    criterion = options.criterion.get("_name")
    flat.update(criterion=criterion and criterion.removesuffix("_fast"))
    for name in [name for name in flat if name.startswith("admin_") or name == "update_freq"]:
        del flat[name]
    if checkpoint.kind in OURS:
        for stack, place in zip(("encoder", "decoder"), checkpoint.scheme.norm):
            flat[f"{stack}_normalize_before"] = place == "before"
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
