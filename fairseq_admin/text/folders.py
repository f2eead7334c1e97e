"""Where a model's text is: a folder of merges, settings and dictionaries, and its folder `bin`, with fairseq's data.

fairseq-preprocess writes a dictionary next to its data, so a file may be in either. A user names one of the two.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from .bpe import CODES
from .tokens import FILE


def folders(named: Path) -> list[Path]:
    """The folder that the user names, and the other of the two."""
    is_bin = named.absolute().name == "bin"
    return [named, Path(os.path.normpath(named / "..")) if is_bin else named / "bin"]


def binarised(name: str) -> Path:
    """The one of the two that has binarised data; if none has, where it should be: in `bin`, if that is there.

    Args:
        name: the named folder's, as the command line has it.
    """
    named = Path(name)
    nowhere = named / "bin" if (named / "bin").is_dir() else named
    return next((folder for folder in folders(named) if any(folder.glob("*.idx"))), nowhere)


def files_in(places: Iterable[Path]) -> list[Path]:
    """What these folders hold of a model's text: merges, settings, dictionaries, binarised data."""
    patterns = (CODES, FILE, "dict.*.txt", "*.*-*.*.idx", "*.*-*.*.bin")
    return [path for place in places for pattern in patterns for path in place.glob(pattern)]
