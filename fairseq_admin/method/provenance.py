"""Where a model's ω came from, or which other scheme it is of, kept as a tensor in its state dict.

A state dict passes through casts to half precision, checkpoint averaging and exponential moving averages, all of which
take every entry for a float tensor. So the record, a short JSON text, is stored as one float a byte: values up to 255
survive float16, bfloat16, a mean of equal records and a decayed sum, and are rounded back when read.
"""

import json
from typing import Any, Dict, Mapping, Optional

import torch
from torch import Tensor

from ..errors import AdminError

KEY = "admin_provenance"
LENGTH = 256


def encode(record: Dict[str, Any]) -> Tensor:
    """A record as a tensor. Shape (256,), float32, zero-padded."""
    text = json.dumps(record, separators=(",", ":")).encode("ascii")
    assert len(text) <= LENGTH, text
    tensor = torch.zeros(LENGTH)
    tensor[: len(text)] = torch.tensor(list(text), dtype=torch.float32)
    return tensor


def decode(tensor: Tensor) -> Optional[Dict[str, Any]]:
    """The record that `encode` stored, or None where there is none yet.

    Raises:
        AdminError: the bytes are no record (an average of checkpoints with different provenance, for example).
    """
    text = bytes(int(value) for value in tensor.detach().float().round().clamp(0, 255).tolist()).rstrip(b"\0")
    if not text:
        return None
    try:
        record = json.loads(text)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise AdminError(f"{KEY} holds no record of where omega came from: were different runs averaged?")
    return record


def of_stacks(state: Mapping[str, Tensor]) -> Dict[str, Tensor]:
    """A state dict with RoBERTa's one stack, encoder.sentence_encoder, named as a Transformer's: encoder."""
    return {key.replace("encoder.sentence_encoder.", "encoder.", 1): tensor for key, tensor in state.items()}


def scheme(state: Mapping[str, Tensor]) -> str:
    """The scheme that a state dict tells: Admin's record names none, a stock Transformer has no record.

    A stock Transformer's norms are told by the one that ends a Pre-LN stack (where a model has one stack, by that one's
    alone). Schemes that only draw other initial weights look, and compute, like the stock Transformer that they are.

    Raises:
        AdminError: the record is none.
    """
    if KEY in state:
        return (decode(state[KEY]) or {}).get("scheme", "admin")
    state = of_stacks(state)
    before = {
        side: f"{side}.layer_norm.weight" in state
        for side in ("encoder", "decoder")
        if any(key.startswith(f"{side}.layers.") for key in state)
    }
    if all(before.values()) or not any(before.values()):
        return "pre-ln" if any(before.values()) else "post-ln"
    return "pre-ln (encoder only)" if before["encoder"] else "post-ln-pre-ln"
