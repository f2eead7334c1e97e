"""Compare a prepared text with what is published of it: numbers of pairs, and git's blob ids of files."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

log = logging.getLogger(__name__)


def blob(path: Path) -> str:
    """What `git hash-object` prints: the SHA-1 of "blob SIZE", a zero byte and the content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.sha1(b"blob %d\0" % path.stat().st_size)).hexdigest()


def compare(folder: Path, languages: Iterable[str], pairs: Mapping[str, str], blobs: Mapping[str, str]) -> None:
    """Refuse another number of pairs, and say whether the files are the published ones.

    Args:
        pairs: how many, by the prefix of their files.
        blobs: ids by file.

    Raises:
        ValueError: there are more pairs or fewer.
    """
    for path, expected in [(folder / f"{name}.{code}", count) for name, count in pairs.items() for code in languages]:
        with path.open("rb") as file:
            count = sum(1 for _ in file)
        if count != int(expected):
            raise ValueError(
                f"{path} has {count} lines, expected {expected}, as in the published text. Check where the archive "
                "came from, or give EXPECT= to train on this text anyway."
            )
    others = [name for name, value in blobs.items() if blob(folder / name) != value]
    if others:
        log.info("%s: not the published text, by git's blob ids: %s.", folder, ", ".join(others))
    elif blobs:
        log.info("%s: the published text, byte for byte: %s.", folder, ", ".join(blobs))
