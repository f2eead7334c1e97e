"""Fingerprints of a model's dictionaries, merges and text settings, to recognise another model's files.

With another dictionary of the same size, or with other merges, a model would translate to garbage without an error.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import AdminError

KEY = "admin_text"
"""Entry of a state dict's metadata, which torch keeps next to the weights. It holds fingerprints of the dictionaries by
stack, "encoder" and "decoder", and of files by name, "codes" and "text.json"."""


def of_bytes(content: bytes) -> str:
    """The fingerprint of a file.

    Args:
        content: the content of the file.

    Returns:
        16 hexadecimal digits.
    """
    return hashlib.sha256(content).hexdigest()[:16]


def of_dictionary(words: Any) -> str:
    """The fingerprint of a dictionary: of its symbols in order, without their counts.

    Args:
        words: a fairseq Dictionary.

    Returns:
        16 hexadecimal digits.
    """
    return of_bytes("\n".join(words.symbols).encode())


def refuse_other_dictionary(words: Any, path: Path, size: int, expected: str | None) -> None:
    """Refuse a dictionary that does not belong to a model.

    Args:
        words: a fairseq Dictionary.
        path: its file or folder, for the message.
        size: number of symbols that the model has.
        expected: the fingerprint of the model's dictionary. None: unknown.

    Raises:
        AdminError: the size or the fingerprint differs.
    """
    if len(words) != size:
        fault = f"has {len(words)} symbols and the model {size}"
    elif expected not in (None, of_dictionary(words)):
        fault = "is not the one the model was trained with"
    else:
        return
    raise AdminError(f"{path}: the dictionary {fault}. Give the folder of the model's own as --data.")


def read_fingerprints(state: Mapping[str, Any]) -> dict[str, str]:
    """Read the fingerprints of a state dict. (A wrapper prefixes the model's metadata.)

    Args:
        state: a state dict.

    Returns:
        By stack or file name. Empty for a stock model.
    """
    entries = getattr(state, "_metadata", {}).values()
    return next((dict(entry[KEY]) for entry in entries if KEY in entry), {})


def with_fingerprints(state: Mapping[str, Any], fingerprints: Mapping[str, str]) -> OrderedDict[str, Any]:
    """Copy a state dict with the same tensors, and replace its fingerprints.

    Args:
        state: a state dict.
        fingerprints: by stack or file name.

    Returns:
        The copy.
    """
    copied: Any = OrderedDict(state)
    copied._metadata = OrderedDict({"": {KEY: dict(fingerprints)}})
    return copied
