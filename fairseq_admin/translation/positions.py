"""Read the number of positions of a CTranslate2 model from its file, since CTranslate2 does not tell it."""

from __future__ import annotations

import struct
from pathlib import Path

POSITIONS = 1024
"""fairseq's default number of positions."""


def positions(path: Path) -> int:
    """Read the number of positions.

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

        number("I"), string(), number("I")  # version of the format, kind of model, its revision
        for _ in range(number("I")):
            name, shape = string(), [number("I") for _ in range(number("B"))]
            number("B")
            file.seek(number("I"), 1)
            if "/position_encodings/" in name:
                tables.append(shape[0])
    return min(tables, default=POSITIONS)
