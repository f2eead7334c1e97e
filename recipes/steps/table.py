"""Tables of archives, such as recipes/archives.tsv, and the check of a file against its row.

A row has four columns, separated by tabs: name, size in bytes or -, checksum, and addresses separated by spaces. A
checksum is 64 hex digits (SHA-256), md5:..., or - if none is published. # starts a comment.
"""

from __future__ import annotations

import gzip
import hashlib
import tarfile
import zlib
from pathlib import Path
from typing import NamedTuple

from recipes.steps.bar import reading
from recipes.steps.common import read_lines

# Errors of reading a damaged archive.
DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, tarfile.TarError)


class Archive(NamedTuple):
    """One row. `size` and `checksum` ("algorithm:digits") are None if the table has none."""

    name: str
    size: int | None
    checksum: str | None
    urls: tuple[str, ...]


def read_table(path: Path) -> dict[str, Archive]:
    """The rows of a table, by name.

    Raises:
        ValueError: a row has another format.
    """
    archives = {}
    for row in (row for row in read_lines(path) if row.strip() and not row.startswith("#")):
        try:
            name, size, checksum, addresses = row.split("\t")
            count = None if size == "-" else int(size)
        except ValueError:
            raise ValueError(f"{path}: found {row!r}; expected name, bytes, checksum, addresses. Fix it.") from None
        full = None if checksum == "-" else checksum if ":" in checksum else f"sha256:{checksum}"
        archives[name] = Archive(name, count, full, tuple(addresses.split()))
    return archives


def digest(path: Path, algorithm: str) -> str:
    """The digest of a file in hex."""
    with reading(f"{algorithm} of {path}", path) as file:
        return hashlib.file_digest(file, algorithm).hexdigest()  # type: ignore[arg-type]


def check(where: str, path: Path, archive: Archive) -> None:
    """Check a file by the archive's size and checksum; without a checksum, check that it is a readable archive.

    Raises:
        ValueError: the check failed. The message has no full stop.
    """
    size = path.stat().st_size
    if archive.size not in (None, size):
        raise ValueError(f"{where}: found {size} bytes, expected {archive.size}")
    algorithm, _, expected = (archive.checksum or "").partition(":")
    if algorithm and (digits := digest(path, algorithm)) != expected:
        raise ValueError(f"{where}: found {algorithm} {digits}, expected {expected}")
    if not algorithm:
        try:
            with tarfile.open(path) as tar:
                tar.getmembers()
        except DAMAGE as error:
            reason = str(error).partition("\n")[0].rstrip(":")
            raise ValueError(
                f"{where}: found a truncated or corrupt archive ({reason}), expected a whole one"
            ) from None
