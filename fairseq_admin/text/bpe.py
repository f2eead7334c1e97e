"""From tokens to a model's units and back: byte-pair encoding by the merges in the file `codes` next to a model."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import AdminError
from ..packages import need

CODES = "codes"


class BPE:
    """Byte-pair encoding by the merges of a file in fastBPE's format."""

    def __init__(self, codes: Path) -> None:
        """
        Args:
            codes: the file of merges.

        Raises:
            AdminError: a line is not "left right count". (fastBPE would take it for a merge.)
            OSError: the file cannot be read. (fastBPE would end the process.)
        """
        fast_bpe = need("fastBPE")
        for number, line in enumerate(codes.read_bytes().removesuffix(b"\n").split(b"\n"), 1):
            if not re.fullmatch(rb"\S+ \S+ \d+\r?", line):
                raise AdminError(
                    f"{codes}: line {number} is not a merge; expected two units and a count, as fastBPE writes them. "
                    "Give the file of the training text (from subword-nmt: without the #version line, 1 as the count)."
                )
        with _silent_stderr():  # fastBPE prints the number of merges
            self._codes = fast_bpe.fastBPE(str(codes))

    def apply(self, lines: list[str]) -> list[str]:
        """Split tokens into units.

        Args:
            lines: tokens with spaces between them.

        Returns:
            For each line its units, with one space between them. "@@" ends a unit inside a token.
        """
        units = self._codes.apply(lines)
        assert len(units) == len(lines), "fastBPE changed the number of lines"
        return units


def in_pieces(units: Iterable[str]) -> bool:
    """Whether units are pieces of words, which need merges.

    Args:
        units: the units of a dictionary.

    Returns:
        Whether a unit ends in "@@".
    """
    return any(unit.endswith("@@") for unit in units)


def remove_bpe(units: str) -> str:
    """Join units to tokens.

    Args:
        units: the units of one line, as `BPE.apply` returns them.

    Returns:
        Tokens with one space between them.
    """
    return f"{units} ".replace("@@ ", "").rstrip()


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Silence standard error, for C++ too."""
    stderr = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
