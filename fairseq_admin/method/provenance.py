"""Where a model's ω came from, or which other scheme it has, kept as a tensor in its state dict.

A state dict passes through casts to half precision, checkpoint averaging and exponential moving averages, all of which
treat every entry as a float tensor. So the record, a short JSON text, is stored as one float per byte: values up to 255
survive float16, bfloat16 and a mean of equal records, and are rounded back when read.

A decayed sum in bfloat16 they do not survive: 125 * 0.99 + 125 * 0.01 gives 124.5 there, which is read as 124. So a
model's state dict has its records in float32, whatever the model is in; of 125, decays up to 0.99999 then keep more
than 124.8, however often.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from ..errors import AdminError

KEY = "admin_provenance"
LENGTH = 256


def encode(record: dict[str, Any]) -> Tensor:
    """A record as a tensor. Shape (256,), float32, zero-padded."""
    text = json.dumps(record, separators=(",", ":")).encode("ascii")
    assert len(text) <= LENGTH, text
    tensor = torch.zeros(LENGTH)
    tensor[: len(text)] = torch.tensor(list(text), dtype=torch.float32)
    return tensor


def decode(tensor: Tensor) -> dict[str, Any] | None:
    """The record that `encode` stored, or None where there is none yet.

    Raises:
        AdminError: the bytes are not a record (an average of checkpoints with different provenance, for example).
    """
    values = tensor.detach().float().flatten().nan_to_num(255).round().clamp(0, 255)  # no text has a byte 255
    text = bytes(values.to(torch.uint8).tolist()).rstrip(b"\0")
    if not text:
        return None
    try:
        record = json.loads(text)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise AdminError(f"{KEY} holds no record of where omega came from: were different runs averaged?")
    return record
