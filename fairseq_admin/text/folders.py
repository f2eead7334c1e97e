"""The two folders of a model's text: one with merges, settings and dictionaries, and its folder `bin`, fairseq's data.

fairseq-preprocess writes the dictionaries next to its data, so a file may be in either folder. The user names one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from .bpe import CODES
from .tokens import FILE


def folders(named: Path) -> list[Path]:
    """The folder that the user named, and the other one."""
    is_bin = named.absolute().name == "bin"
    return [named, Path(os.path.normpath(named / "..")) if is_bin else named / "bin"]


def binarised(name: str) -> Path:
    """Find the folder with binarised data. If there is none: `bin` if it exists, or else the named folder.

    Args:
        name: the named folder, as the command line has it.
    """
    named = Path(name)
    nowhere = named / "bin" if (named / "bin").is_dir() else named
    return next((folder for folder in folders(named) if any(folder.glob("*.idx"))), nowhere)


def files_in(places: Iterable[Path]) -> list[Path]:
    """List the files of a model's text in these folders: merges, settings, dictionaries, binarised data."""
    patterns = (CODES, FILE, "dict.*.txt", "*.*-*.*.idx", "*.*-*.*.bin")
    return [path for place in places for pattern in patterns for path in place.glob(pattern)]
