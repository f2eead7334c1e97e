"""How many positions a CTranslate2 model has, read from its file: CTranslate2 does not tell."""

from __future__ import annotations

import struct
from pathlib import Path

POSITIONS = 1024
"""How many positions fairseq's Transformers have, unless told otherwise."""


def positions(path: Path) -> int:
    """How many positions a CTranslate2 model has, from its file.

    The file lists every tensor's name, shape, type and bytes (ModelSpec._serialize in ctranslate2/specs/model_spec.py).

    Raises:
        struct.error: the file is cut short.
    """
    tables = []
    with path.open("rb") as file:

        def number(kind: str) -> int:
            return struct.unpack(f"<{kind}", file.read(struct.calcsize(kind)))[0]

        def string() -> str:
            return file.read(number("H"))[:-1].decode("utf-8")

        number("I"), string(), number("I")  # versions of the format, and the kind of model
        for _ in range(number("I")):
            name, shape = string(), [number("I") for _ in range(number("B"))]
            number("B")
            file.seek(number("I"), 1)
            if "/position_encodings/" in name:
                tables.append(shape[0])
    return min(tables, default=POSITIONS)
