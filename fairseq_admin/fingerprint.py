"""What a model's text was made with, in a few letters: enough to tell another model's files from its own.

A dictionary of the same size as the model's, or other merges, would translate to garbage without an error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

KEY = "admin_text"
"""The entry of a checkpoint's `task_state`, or of a folded one's `admin_fold`, that holds fingerprints.

They are named "encoder" and "decoder", the dictionary of either stack, or as the file is: "codes", "text.json".
"""


def of_bytes(content: bytes) -> str:
    """The fingerprint of a file's content."""
    return hashlib.sha256(content).hexdigest()[:16]


def of_settings(settings: Mapping[str, Any]) -> str:
    """The fingerprint of what a text.json says, every setting with its value, whatever the file's layout."""
    return of_bytes(json.dumps(dict(settings), sort_keys=True).encode())


def of_dictionary(words: Sequence[str]) -> str:
    """The fingerprint of a fairseq dictionary: its symbols in their order. Their counts are not part of it."""
    return of_bytes("\n".join(words[number] for number in range(len(words))).encode())


def note(task: Any) -> None:
    """Have the checkpoints of a task name its dictionaries, where it has one a stack."""
    state = getattr(task, "state", None)
    named = {"encoder": "source_dictionary", "decoder": "target_dictionary"}
    dictionaries = {stack: getattr(task, name, None) for stack, name in named.items()}
    found = {stack: of_dictionary(words) for stack, words in dictionaries.items() if words}
    if state is not None and len(found) == len(named):
        state.merge_state_dict({KEY: found})
