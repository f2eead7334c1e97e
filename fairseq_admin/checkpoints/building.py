"""The model of a checkpoint: whether its weights are whole, and the model built with them."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY, BaseFairseqModel
from torch import Tensor

from ..errors import AdminError, line
from ..method.state_dict import STRAY
from .checkpoint import STACKS, Checkpoint


def check(checkpoint: Checkpoint) -> None:
    """Refuse what is missing, of another shape or not a number, before anything is computed with it.

    If the architecture is not known here, only the last is looked for.

    Raises:
        AdminError: there is such an entry, or no such model can be built.
    """
    if checkpoint.kind in STACKS:
        # Names and shapes alone, where fairseq can do that: RoBERTa draws its initial weights on the CPU.
        with torch.device("cpu" if checkpoint.stacks == ("encoder",) else "meta"):
            model = _unloaded(checkpoint)
        weights = dict(checkpoint.weights)
        model.upgrade_state_dict(weights)
        for key, tensor in model.state_dict().items():
            what = f"has shape {tuple(weights[key].shape)}" if key in weights else "is missing"
            if what != f"has shape {tuple(tensor.shape)}" and not STRAY.search(key):
                raise AdminError(
                    f"{checkpoint.name}: {key} {what}; {tuple(tensor.shape)} was expected by its architecture "
                    f"{checkpoint.arguments._name}. Give the file that fairseq-train saved."
                )
    for key, tensor in checkpoint.weights.items():
        if not STRAY.search(key):
            refuse_not_finite(checkpoint.name, key, tensor)


def refuse_not_finite(name: str, key: str, tensor: Tensor) -> None:
    """Refuse an entry with NaN or infinity."""
    if bad := tensor.numel() - int(tensor.isfinite().sum()):
        raise AdminError(
            f"{name}: {key} holds NaN or infinity, {bad} of {tensor.numel()} values: the run had diverged. Leave this "
            "file out, and take an earlier one."
        )


def build(
    checkpoint: Checkpoint, source: Dictionary | None = None, target: Dictionary | None = None
) -> BaseFairseqModel:
    """The model with its weights, float32, in evaluation mode.

    Args:
        checkpoint: its weights and options.
        source, target: its dictionaries; None: made-up words, as many as it has.

    Raises:
        AdminError: the architecture is unknown, or the weights do not fit it.
    """
    model = _unloaded(checkpoint, source, target)
    try:
        model.load_state_dict(dict(checkpoint.weights), strict=True, model_cfg=checkpoint.arguments)
    except RuntimeError as error:
        message = " ".join(str(error).split())[:200]
        raise AdminError(
            f"{checkpoint.name}: its weights do not fit its architecture {checkpoint.arguments._name} ({message} ...). "
            "Give the file that fairseq-train saved."
        ) from None
    return model.eval()


def _unloaded(
    checkpoint: Checkpoint, source: Dictionary | None = None, target: Dictionary | None = None
) -> BaseFairseqModel:
    """The model before its weights are loaded."""
    args = Namespace(**vars(checkpoint.arguments))  # building a model may write into its options
    args.admin_fast = "off"  # nothing is trained here: stock layers compute the same, and need no probe of the CPU
    args.checkpoint_activations = args.offload_activations = False  # likewise
    sizes = list(checkpoint.vocabulary.values())
    what, advice = ("options and dictionaries", "dictionaries that it was trained with")
    if source is None:
        what, advice = ("options", "file that fairseq-train saved")
    source = source or _words(sizes[0])
    target = target or (source if sizes[0] == sizes[-1] else _words(sizes[-1]))
    longest = checkpoint.options.task.get("tokens_per_sample") or 512  # fairseq's default
    task = SimpleNamespace(source_dictionary=source, target_dictionary=target, max_positions=lambda: longest)
    try:
        return ARCH_MODEL_REGISTRY[args._name].build_model(args, task)
    except AdminError:
        raise
    except Exception as error:  # fairseq checks little: what does not fit fails where it is first used
        raise AdminError(
            f"{checkpoint.name}: no model can be built from its {what} ({line(error)}). Give the {advice}."
        ) from None


def _words(symbols: int) -> Dictionary:
    words = Dictionary()
    for number in range(symbols - len(words)):
        words.add_symbol(f"w{number}")
    return words
