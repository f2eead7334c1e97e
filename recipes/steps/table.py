"""A table of archives: recipes/archives.tsv, and any other of its format.

A row is a name, bytes, a checksum and addresses separated by spaces, with tabs between; # starts a comment. Bytes may
be -. A checksum is one of

    64 hex digits     SHA-256
    md5:32 digits     MD5, where nothing better is published
    -                 none: the first download is trusted, recorded and held (lock.py)
    text              none of the file, but one of the text in it, which `extract --sums` checks
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

from recipes.steps.bar import reading
from recipes.steps.common import read_lines

CHECKSUM = re.compile(r"(sha256):([0-9a-f]{64})|(md5):([0-9a-f]{32})")
BLOCK = 1 << 20


class Archive(NamedTuple):
    """One row. `size` and `checksum` are None where the table has none; `checksum` is "algorithm:digits".

    `recorded` is the lock file that they come from, if not the table."""

    name: str
    size: int | None
    checksum: str | None
    urls: tuple[str, ...]
    text_checked: bool = False
    recorded: Path | None = None


def parse_row(where: str, row: str) -> Archive:
    columns = row.split("\t")
    if len(columns) != 4:
        raise ValueError(f"{where}: found {len(columns)} columns, expected name, bytes, checksum, addresses. Fix it.")
    name, size, checksum, addresses = columns
    if "/" in name or name in ("", ".", ".."):
        raise ValueError(f"{where}: the name is {name!r}, expected a file name without folders. Fix it.")
    if size != "-" and not size.isdecimal():
        raise ValueError(f"{where}: bytes is {size!r}, expected a number or -. Fix it.")
    full = checksum if ":" in checksum else f"sha256:{checksum}"
    if checksum not in ("-", "text") and not CHECKSUM.fullmatch(full):
        raise ValueError(f"{where}: the checksum is {checksum!r}, expected 64 hex digits, md5:..., - or text. Fix it.")
    urls = tuple(addresses.split())
    for url in urls:
        check_url(where, url)
    if not urls:
        raise ValueError(f"{where}: found no address, expected one at least. Fix it.")
    known = checksum not in ("-", "text")
    return Archive(name, None if size == "-" else int(size), full if known else None, urls, checksum == "text")


def check_url(where: str, url: str) -> None:
    if not re.match(r"https?://[^/\s]+", url):
        raise ValueError(f"{where}: the address is {url!r}, expected one with http:// or https://. Fix it.")


def read_table(path: Path) -> dict[str, Archive]:
    """The rows by name.

    Raises:
        ValueError: the file is missing, a row has another format, or a name comes twice.
    """
    archives: dict[str, Archive] = {}
    for number, row in enumerate(read_lines(path), start=1):
        if not row.strip() or row.startswith("#"):
            continue
        archive = parse_row(f"{path}: line {number}", row)
        if archive.name in archives:
            raise ValueError(f"{path}: line {number}: {archive.name} comes twice. Keep one row.")
        archives[archive.name] = archive
    return archives


def digest(path: Path, algorithm: str) -> str:
    """The file's digest in hex, read in blocks."""
    state = hashlib.new(algorithm)
    with reading(f"{algorithm} of {path}", path) as file:
        while block := file.read(BLOCK):
            state.update(block)
    return state.hexdigest()


# What a file of that kind begins with: (offset, bytes).
MAGIC = {".tgz": (0, b"\x1f\x8b"), ".gz": (0, b"\x1f\x8b"), ".tar": (257, b"ustar")}


def page(start: bytes) -> str | None:
    """An HTML page by its name, if these bytes begin one; servers and captive networks send one instead of a file."""
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not re.match(rb"<(!doctype|html|head|body|\?xml)\b", text, re.IGNORECASE):
        return None
    title = re.search(rb"<title[^>]*>(.*?)</title>", text, re.IGNORECASE | re.DOTALL)
    return "an HTML page" + (f' ("{" ".join(title[1].decode(errors="replace").split())[:80]}")' if title else "")


def check_start(where: str, path: Path, kind: str) -> None:
    """Does the file begin as its kind does?

    Args:
        where: what to call it in a message.
        kind: the ending of its name: .tgz, .gz or .tar; of others nothing is known.

    Raises:
        ValueError: it is an HTML page, empty, or something else; the message has no final stop.
    """
    with path.open("rb") as file:
        start = file.read(4096)
    if not start:
        raise ValueError(f"{where}: found an empty file, expected an archive")
    if found := page(start):
        raise ValueError(f"{where}: found {found}, expected an archive")
    offset, magic = MAGIC.get(kind, (0, b""))
    if not start[offset:].startswith(magic):
        what = {".tar": "a tar archive"}.get(kind, "a gzip file")
        raise ValueError(f"{where}: found {start[:8]!r}... at its start, expected {what}")
