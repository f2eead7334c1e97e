"""What a model's text was made with, in a few letters: enough to tell another model's files from its own.

A dictionary of the same size as the model's, or other merges, would translate to garbage without an error.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

KEY = "admin_text"
"""Where a state dict's metadata, which torch keeps next to the weights, holds fingerprints: of the dictionary of either
stack, "encoder" and "decoder", and of files by their names, "codes" and "text.json"."""


def of_bytes(content: bytes) -> str:
    """The fingerprint of a file's content."""
    return hashlib.sha256(content).hexdigest()[:16]


def of_dictionary(words: Any) -> str:
    """The fingerprint of a fairseq dictionary: its symbols in their order, without their counts."""
    return of_bytes("\n".join(words.symbols).encode())


def noted(state: Mapping[str, Any]) -> dict[str, str]:
    """The fingerprints that a state dict holds, none of a stock model's. A wrapper gives its model's a prefix."""
    entries = getattr(state, "_metadata", {}).values()
    return next((dict(entry[KEY]) for entry in entries if KEY in entry), {})


def noting(state: Mapping[str, Any], fingerprints: Mapping[str, str]) -> OrderedDict[str, Any]:
    """The state dict, of the same tensors, with these fingerprints in place of those that it holds."""
    copied: Any = OrderedDict(state)
    copied._metadata = OrderedDict({"": {KEY: dict(fingerprints)}})
    return copied
