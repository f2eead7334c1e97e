"""The record of a model's scheme and of the origin of its ω, stored as a tensor in its state dict.

Casts to half precision, checkpoint averaging and exponential moving averages treat every entry of a state dict as a
float tensor. So the record, a short JSON text, is stored as one float per byte: values up to 255 survive float16,
bfloat16 and a mean of equal records, and `decode` rounds them.

They do not survive a decayed sum in bfloat16: 125 * 0.99 + 125 * 0.01 gives 124.5, which would be read as 124. So a
state dict stores its records in float32, whatever the model's precision. There, decays up to 0.99999 keep 125 above
124.8 after any number of steps.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from ..errors import AdminError

KEY = "admin_provenance"
LENGTH = 256


def encode(record: dict[str, object]) -> Tensor:
    """Store a record in a tensor.

    Args:
        record: at most 256 bytes of JSON, in ASCII.

    Returns:
        One float per byte, padded with zeros. Shape (256,), float32.
    """
    text = json.dumps(record, separators=(",", ":")).encode("ascii")
    assert len(text) <= LENGTH, text
    tensor = torch.zeros(LENGTH)
    tensor[: len(text)] = torch.tensor(list(text), dtype=torch.float32)
    return tensor


def decode(tensor: Tensor) -> dict[str, Any] | None:
    """Read a record that `encode` stored.

    Args:
        tensor: shape (256,), any float type.

    Returns:
        The record; None if the tensor is all zeros: nothing has been profiled yet.

    Raises:
        AdminError: the bytes are not a record, for example an average over different runs.
    """
    values = tensor.detach().float().flatten().nan_to_num(255).round().clamp(0, 255)  # JSON has no byte 255
    text = bytes(values.to(torch.uint8).tolist()).rstrip(b"\0")
    if not text:
        return None
    try:
        record = json.loads(text)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise AdminError(
            f"{KEY} holds no record of omega's origin; it may be an average over runs. Average checkpoints of one run."
        )
    return record
