"""Tables of archives, such as recipes/archives.tsv, and the check of a file against its row.

A row is a name, bytes or -, a checksum and addresses separated by spaces, with tabs between; # starts a comment. A
checksum is 64 hex digits (SHA-256), md5:..., or - where none is published.
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
    """One row. `size` and `checksum` ("algorithm:digits") are None where the table has none."""

    name: str
    size: int | None
    checksum: str | None
    urls: tuple[str, ...]


def read_table(path: Path) -> dict[str, Archive]:
    """The rows by name.

    Raises:
        ValueError: the file is missing, or a row has another format.
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
    """The file's digest in hex."""
    with reading(f"{algorithm} of {path}", path) as file:
        return hashlib.file_digest(file, algorithm).hexdigest()  # type: ignore[arg-type]


def check(where: str, path: Path, archive: Archive) -> None:
    """Check that a file is the archive, by its size and checksum; without a checksum, that it can be read.

    Raises:
        ValueError: it is not; the message has no full stop.
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
