"""What a model's text was made with, in a few letters: enough to tell another model's files from its own.

A dictionary of the same size as the model's, or other merges, would translate to garbage without an error.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import AdminError

KEY = "admin_text"
"""Where a state dict's metadata, which torch keeps next to the weights, holds fingerprints.

They are named "encoder" and "decoder", the dictionary of either stack, or as the file is: "codes", "text.json".
"""

FILE = "fingerprints.json"
"""The file that holds them in a folder that was exported."""


def of_bytes(content: bytes) -> str:
    """The fingerprint of a file's content."""
    return hashlib.sha256(content).hexdigest()[:16]


def of_settings(settings: Mapping[str, Any]) -> str:
    """The fingerprint of what a text.json says, whatever the file's layout."""
    return of_bytes(json.dumps(dict(settings), sort_keys=True).encode())


def of_dictionary(words: Any) -> str:
    """The fingerprint of a fairseq dictionary: its symbols in their order, without their counts."""
    return of_bytes("\n".join(words.symbols).encode())


def of_stacks(stacks: Mapping[str, Any]) -> dict[str, str]:
    """The fingerprint of the dictionary of each stack that knows it.

    It is kept with the dictionary until there are more words: a moving average (--store-ema) asks several times an
    update.
    """
    dictionaries = {stack: getattr(module, "dictionary", None) for stack, module in stacks.items()}
    for words in filter(None, dictionaries.values()):
        if getattr(words, "admin_fingerprint", (0, ""))[0] != len(words):
            words.admin_fingerprint = len(words), of_dictionary(words)
    return {stack: words.admin_fingerprint[1] for stack, words in dictionaries.items() if words}


def noted(state: Mapping[str, Any]) -> dict[str, str]:
    """The fingerprints that a state dict holds, none of a stock model's. A wrapper gives its model's a prefix."""
    entries = getattr(state, "_metadata", {}).values()
    return next((dict(entry[KEY]) for entry in entries if KEY in entry), {})


def noting(state: Mapping[str, Any], fingerprints: Mapping[str, str]) -> OrderedDict[str, Any]:
    """The state dict, of the same tensors, with these fingerprints in place of those that it holds."""
    copied: Any = OrderedDict(state)
    copied._metadata = OrderedDict({"": {KEY: dict(fingerprints)}})
    return copied


def refuse_other_dictionary(held: Mapping[str, str], stacks: Mapping[str, Any]) -> None:
    """Refuse to load weights into a model that reads another dictionary; its size alone does not tell.

    Args:
        held: the fingerprints that come with the weights.
        stacks: the model's.

    Raises:
        AdminError: a stack's dictionary is another.
    """
    for stack, fingerprint in of_stacks(stacks).items():
        if held.get(stack) not in (None, fingerprint):
            raise AdminError(
                f"the checkpoint's {stack} was trained with another dictionary than the data's: with other units, or "
                "the same in another order. Give the data that it was trained on (or, to make new data with its "
                "dictionaries, fairseq-preprocess --srcdict and --tgtdict)."
            )


def write(folder: Path, fingerprints: Mapping[str, str]) -> None:
    """Write the file into an exported folder."""
    (folder / FILE).write_text(json.dumps(dict(fingerprints), indent=1) + "\n", encoding="utf-8")


def read(folder: Path) -> dict[str, str]:
    """The fingerprints of an exported folder; none of one that another program wrote.

    Raises:
        AdminError: the file cannot be read as one.
    """
    try:
        return {**json.loads((folder / FILE).read_text(encoding="utf-8"))}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError):
        raise AdminError(f"{folder / FILE} holds no fingerprints of the text. Export the folder again.") from None
