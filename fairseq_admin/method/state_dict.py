"""Read stacks, scheme and ω from a state dict, and upgrade the state dict of a stock Transformer."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, MutableMapping, Sequence

import torch
from torch import Tensor

from ..errors import AdminError
from . import provenance

logger = logging.getLogger(__name__)

OMEGA_INIT = ".omega_init"
OMEGA_DELTA = ".omega_delta"
FIRST_DELTA = f".layers.0.self_attn_layer_norm{OMEGA_DELTA}"
"""The key that the first norm of a stack lacks: its ω is not trained."""

# fairseq up to 0.12.2 also stores a position buffer's type, and copies of weights for an inference path.
LEGACY_KEYS = re.compile(r"\.(embed_positions\._float_tensor|layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias))$")


def strip_roberta_prefix(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename RoBERTa's encoder.sentence_encoder to encoder, as in a Transformer.

    Args:
        state: a state dict.

    Returns:
        A copy, with the same tensors.
    """
    return {key.replace("encoder.sentence_encoder.", "encoder.", 1): tensor for key, tensor in state.items()}


def scheme(state: Mapping[str, Tensor]) -> str:
    """Find the scheme of a state dict in its record. Admin's record names none; a stock Transformer has no record.

    In a stock Transformer, a norm at the end of a stack means Pre-LN. A scheme that differs only in its initial weights
    is a stock Transformer.

    Args:
        state: a model's state dict.

    Returns:
        A key of `SCHEMES`, or "pre-ln (encoder only)".

    Raises:
        AdminError: the record cannot be read.
    """
    if provenance.KEY in state:
        return (provenance.decode(state[provenance.KEY]) or {}).get("scheme", "admin")
    state = strip_roberta_prefix(state)
    before = {side: f"{side}.layer_norm.weight" in state for side in ("encoder", "decoder") if layers(state, side)}
    if all(before.values()) or not any(before.values()):
        return "pre-ln" if any(before.values()) else "post-ln"
    return "pre-ln (encoder only)" if before["encoder"] else "post-ln-pre-ln"


def layers(state: Mapping[str, Tensor], stack: str) -> int:
    """Count the layers of a stack.

    Args:
        state: a state dict.
        stack: "encoder", "decoder" or "more".

    Returns:
        Their number; 0 if there is no such stack.
    """
    return len({key.split(".")[2] for key in strip_roberta_prefix(state) if key.startswith(f"{stack}.layers.")})


def prune(state: MutableMapping[str, Tensor], stack: str, kept: Sequence[int]) -> None:
    """Keep only some layers of a stack, numbered from 0 again, in place.

    A stack's first ω is not trained (see `ShortcutNorm.freeze_omega`). If a later layer becomes the first, its
    omega_delta is added to its omega_init: ω keeps its value and is no longer trained.

    fairseq's own pruning drops every layer of the encoder if only the decoder is pruned, and vice versa.

    Args:
        state: the state dict about to be loaded. It stays unchanged in two cases: it has as many layers as `kept`, so
            it was pruned before; or it lacks a layer of `kept`, and then `upgrade_stock_state` refuses its depth.
        stack: "encoder" or "decoder".
        kept: indices of the layers to keep, from 0.
    """
    layer = re.compile(rf"({stack}\.(?:sentence_encoder\.)?layers\.)(\d+)(\..+)")
    matches = {key: match for key in state if (match := layer.fullmatch(key))}
    numbers = {int(match[2]) for match in matches.values()}
    if len(numbers) == len(kept) or not numbers.issuperset(kept):
        return
    tensors = {key: state.pop(key) for key in matches}
    for new, old in enumerate(sorted(kept)):
        for key, match in matches.items():
            if int(match[2]) == old:
                state[f"{match[1]}{new}{match[3]}"] = tensors[key]
    for key in [key for key in state if key.startswith(f"{stack}.") and key.endswith(FIRST_DELTA)]:
        profiled = key[: -len(OMEGA_DELTA)] + OMEGA_INIT
        state[profiled] = state[profiled] + state.pop(key)
    logger.info("Admin: of the %s's %d layers %s were kept", stack, len(numbers), ",".join(map(str, sorted(kept))))


def upgrade_stock_state(
    state: MutableMapping[str, Tensor], expected: Mapping[str, Tensor], depths: Mapping[str, int]
) -> None:
    """Prepare a state dict for loading, in place: check its depth and its ties, drop entries that only an older fairseq
    stores, and add ω = 1 to a stock Post-LN Transformer's if the model has ω.

    Args:
        state: the state dict about to be loaded.
        expected: the model's state dict.
        depths: number of layers of each of the model's stacks.

    Raises:
        AdminError: the depth differs, tied embeddings differ, or a Pre-LN Transformer is to become Admin.
    """
    renamed = strip_roberta_prefix(state)
    for stack, expected_layers in depths.items():
        held = layers(state, stack)
        if held != expected_layers:
            raise AdminError(
                f"the checkpoint's {stack} has {held} layers and the model's has {expected_layers}. Use the "
                f"checkpoint's --{stack}-layers {held} (or its --arch), or another --save-dir to start again."
            )
    ties: dict[int, str] = {}
    for key, tensor in expected.items():
        first = ties.setdefault(tensor.data_ptr(), key)
        if first != key and first in state and key in state and not torch.equal(state[first], state[key]):
            raise AdminError(
                f"{first} and {key} differ in the checkpoint and are one tensor in the model. Tie them as in the "
                "checkpoint (--share-all-embeddings, --share-decoder-input-output-embed, --untie-weights-roberta)."
            )
    for key in [key for key in state if key not in expected and LEGACY_KEYS.search(key)]:
        del state[key]
    if any(key.endswith(OMEGA_INIT) for key in state) or not any(key.endswith(OMEGA_INIT) for key in expected):
        return
    for stack in depths:
        if f"{stack}.layer_norm.weight" in renamed:
            raise AdminError(
                f"the checkpoint is a Pre-LN Transformer (it has {stack}.layer_norm); Admin takes Post-LN weights only."
            )
    logger.info("Admin: the checkpoint has no omega (a stock Transformer): every omega is 1, nothing will be profiled")
    for key, tensor in expected.items():
        if key.endswith(OMEGA_INIT):
            state[key] = torch.ones_like(tensor)
        elif key.endswith(OMEGA_DELTA):
            state[key] = torch.zeros_like(tensor)
    state[provenance.KEY] = provenance.encode({"rule": "stock checkpoint, omega = 1"})


def omega(state: Mapping[str, Tensor], norm: str) -> Tensor | None:
    """ω of one sub-layer in a state dict.

    Args:
        state: a model's state dict.
        norm: the name of the sub-layer's norm, such as encoder.layers.0.final_layer_norm.

    Returns:
        ω as the forward uses it, float64. Shape (C,). None: the norm has no ω.
    """
    if norm + OMEGA_INIT not in state:
        return None
    profiled, delta = state[norm + OMEGA_INIT].double(), state.get(norm + OMEGA_DELTA)
    return profiled if delta is None else profiled + delta.double()


def omegas(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """ω of every sub-layer in a state dict.

    Args:
        state: a model's state dict.

    Returns:
        {"encoder": {"layers.0.self_attn": ω, ...}, "decoder": ...}, new layers under "more", in the state dict's order,
        which is the order of the forward. Each ω has shape (C,), float64. Empty if the model has no ω.
    """
    stacks: dict[str, dict[str, Tensor]] = {}
    state = strip_roberta_prefix(state)
    for norm in [key.removesuffix(OMEGA_INIT) for key in state if key.endswith(OMEGA_INIT)]:
        stack, name = norm.replace("_layer_norm", "").replace("final", "ffn").split(".", 1)
        stacks.setdefault(stack, {})[name] = omega(state, norm)  # type: ignore[assignment]
    return stacks


def omega_summary(omega: Tensor) -> dict[str, float]:
    """Smallest, mean and largest entry of one ω. Shape (C,)."""
    values = omega.detach().to(torch.float64)
    return {"min": values.min().item(), "mean": values.mean().item(), "max": values.max().item()}
