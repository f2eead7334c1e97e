"""What a model's text was made with, in a few letters: enough to tell another model's files from its own.

A dictionary of the same size as the model's, or other merges, would translate to garbage without an error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

KEY = "admin_text"
"""The entry of a checkpoint's `task_state`, or of a folded one's `admin_fold`, that holds fingerprints.

They are named "encoder" and "decoder", the dictionary of either stack, or as the file is: "codes", "text.json".
"""


def of_bytes(content: bytes) -> str:
    """The fingerprint of a file, or, if it is a JSON object, of what it says, whatever its layout."""
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    if isinstance(found, dict):
        content = json.dumps(found, sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()[:16]


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
