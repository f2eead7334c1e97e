"""Check the weights of a checkpoint, and build its model."""

from __future__ import annotations

import copy
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY, BaseFairseqModel
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import AdminError, explained
from ..method.state_dict import LEGACY_KEYS
from .checkpoint import STACKS, Checkpoint


def check_weights(checkpoint: Checkpoint) -> None:
    """Refuse weights that are not finite, or that do not fit the model, before anything is computed from them.

    If this fairseq does not know the architecture, only the values are checked. Entries that only an older fairseq
    stores are dropped.

    Args:
        checkpoint: its weights become copies, because a training may overwrite the file that they are mapped from.

    Raises:
        AdminError: an entry is missing, unknown, of another shape or not finite, or no model can be built.
    """
    checkpoint.state["model"] = copy.deepcopy(checkpoint.weights)
    for key in [key for key in checkpoint.weights if LEGACY_KEYS.search(key)]:
        del checkpoint.weights[key]
    for key, tensor in checkpoint.weights.items():
        refuse_not_finite(checkpoint.name, key, tensor)
    if checkpoint.kind in STACKS:
        build(checkpoint)


def refuse_not_finite(name: str, key: str, tensor: Tensor) -> None:
    """Refuse a tensor with NaN or infinity, except memory that fairseq never initialises and nothing reads.

    Args:
        name: the checkpoint's name.
        key: the tensor's name in the state dict.
        tensor: any tensor.

    Raises:
        AdminError: the tensor has such an entry.
    """
    if key.endswith("._float_tensor"):
        return
    if bad := tensor.numel() - int(tensor.isfinite().sum()):
        raise AdminError(
            f"{name}: {key} holds NaN or infinity, {bad} of {tensor.numel()} values: the run had diverged. Leave this "
            "file out, and take an earlier one."
        )


class _Undrawn(TorchFunctionMode):
    """In this block no initial weights are drawn. (The meta device does the same, but takes a second to import.)"""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.endswith(("uniform_", "normal_")):
            return args[0] if args else None
        return func(*args, **(kwargs or {}))


def build(
    checkpoint: Checkpoint, source: Dictionary | None = None, target: Dictionary | None = None
) -> BaseFairseqModel:
    """Build the model with its weights, float32, in evaluation mode.

    Args:
        checkpoint: a checkpoint whose options describe its weights.
        source, target: the model's dictionaries. None: made-up words.

    Returns:
        The model.

    Raises:
        AdminError: the architecture is unknown, the weights do not fit the model, or the dictionaries belong to another
            model.
    """
    args = Namespace(**vars(checkpoint.arguments))  # building a model may write into its options
    args.admin_fast = "off"  # fast layers are for training; stock ones compute the same and do not probe the CPU
    args.checkpoint_activations = args.offload_activations = False  # also for training only
    sizes = list(checkpoint.vocabulary.values())
    origin = "options" if source is None else "options and its dictionaries"
    source = source or made_up_words(sizes[0])
    target = target or (source if sizes[0] == sizes[-1] else made_up_words(sizes[-1]))
    longest = checkpoint.options.task.get("tokens_per_sample") or 512  # fairseq's default
    task = SimpleNamespace(source_dictionary=source, target_dictionary=target, max_positions=lambda: longest)
    advice = "Give the file that fairseq-train saved, and what it was trained with."
    with explained(f"{checkpoint.name}: no model can be built from its {origin}", advice), _Undrawn():
        model = ARCH_MODEL_REGISTRY[args._name].build_model(args, task)
    try:
        model.load_state_dict(dict(checkpoint.weights), strict=True, model_cfg=checkpoint.arguments)
    except (AdminError, RuntimeError) as error:  # torch's RuntimeError: missing, unexpected or of another shape
        reason = str(error).splitlines()[-1].strip()
        raise AdminError(f"{checkpoint.name}: {reason} Give the file that fairseq-train saved.") from None
    return model.eval()


def made_up_words(symbols: int) -> Dictionary:
    """Make a dictionary of meaningless words.

    Args:
        symbols: number of symbols, including fairseq's four special ones.

    Returns:
        The dictionary.
    """
    words = Dictionary()
    for number in range(symbols - len(words)):
        words.add_symbol(f"w{number}")
    return words
