"""Make the options of a stock Transformer or language model, with the sizes of a checkpoint's model."""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Mapping

from fairseq.models import ARCH_CONFIG_REGISTRY

from .checkpoint import OURS, Checkpoint

ARCH = "transformer_wmt_en_de"
"""Architecture of a stock model. Its options name every size, so it sets none."""

LM_ARCH = "transformer_lm"
"""Architecture of a stock language model."""

DEFAULTS = {
    **{f"max_{side}_positions": 1024 for side in ("source", "target")},
    **{f"{stack}_layerdrop": 0 for stack in ("encoder", "decoder")},
    "relu_dropout": 0,
}
"""fairseq's defaults for options that a checkpoint by hydra, or by an older fairseq, may lack."""


def max_positions(checkpoint: Checkpoint, stack: str) -> int:
    """The number of positions of a stack.

    Args:
        checkpoint: a checkpoint of any model.
        stack: "encoder" or "decoder".

    Returns:
        Their number, without the offset for padding.
    """
    side = {"encoder": "source", "decoder": "target"}[stack]
    options = checkpoint.options
    return options.model.get(f"max_{side}_positions") or options.task.get("tokens_per_sample") or 1024


def stock_options(checkpoint: Checkpoint, **changed: object) -> OrderedDict[str, object]:
    """Make the entry `args` of a stock checkpoint with the sizes of a checkpoint's model.

    Args:
        checkpoint: a checkpoint of an Admin model or a stock model, for translation or language modelling.
        changed: options that differ in the stock model.

    Returns:
        A mapping by `attributes`.
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


def attributes(flat: Mapping[str, object]) -> OrderedDict[str, object]:
    """Make a mapping whose entries are attributes too.

    fairseq and CTranslate2 read a checkpoint's `args` as an argparse.Namespace. torch's safe loader (the default since
    torch 2.6) refuses a Namespace, but accepts an OrderedDict with attributes.

    Args:
        flat: options by name.

    Returns:
        The mapping, sorted by name.
    """
    result: OrderedDict[str, object] = OrderedDict(sorted(flat.items()))
    result.__dict__.update(flat)
    return result
