"""Extract members of an archive into one text file, in the order they are named.

`tags` and `segments` keep and strip what fairseq's prepare-iwslt14.sh and prepare-wmt14en2de.sh do:

    tags      lines with <url>, <talkid> or <keywords> go; the tags <title> and <description> go, their text stays
    segments  only lines with <seg id stay, without the tag and the white space at its ends

Entities (&amp;) stay: those scripts leave them, and so does sacreBLEU's own newstest2014; its tokeniser 13a reads them.
Those scripts make U+2019 an apostrophe in segments. Here `straight` does: a reference stays as it is.
"""

from __future__ import annotations

import gzip
import logging
import re
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from recipes.steps import bar
from recipes.steps.common import read_lines, replacing
from recipes.steps.table import DAMAGE, check, digest, read_table

log = logging.getLogger(__name__)
BLOCK = 1 << 20
DROPPED = ("<url>", "<talkid>", "<keywords>")
TAGS = re.compile("</?(?:title|description)>")
# White space is what sed takes for it in these files; no-break spaces belong to the text.
OPENING = re.compile(r'<seg id="[0-9]*">[ \t\r\f\v]*')
CLOSING = re.compile(r"[ \t\r\f\v]*</seg>[ \t\r\f\v]*")


def stripped(line: str, kind: str) -> str | None:
    """The text of a line of that kind, or None if it has none.

    Raises:
        ValueError: a segment ends on another line.
    """
    if kind == "tags":
        return None if any(tag in line for tag in DROPPED) else TAGS.sub("", line)
    if kind == "plain":
        return line
    if "<seg id" not in line:
        return None
    if "</seg>" not in line:
        raise ValueError(f"{line[:60]!r} has no </seg>, expected one per line. Check the archive.")
    return CLOSING.sub("", OPENING.sub("", line))


def unzipped(name: str, file: IO[bytes]) -> IO[bytes]:
    """The text of a file that is compressed if its name says so."""
    return gzip.GzipFile(fileobj=file, mode="rb") if name.endswith("gz") else file  # type: ignore[return-value]


def unpacked(folder: Path, name: str) -> Path | None:
    """The file of that name in a folder, compressed or not.

    Raises:
        ValueError: both are there.
    """
    there = [path for path in (folder / f"{name}.gz", folder / name) if path.is_file()]
    if len(there) > 1:
        raise ValueError(f"{folder}: holds {name} and {name}.gz, expected one of them. Move the other away.")
    return next(iter(there), None)


@contextmanager
def member(archive: Path, name: str) -> Iterator[IO[bytes]]:
    """The text of that name in an archive, or in a folder that was unpacked, where it may be compressed (NAME.gz).

    No path from an archive is written to, and no link in it is followed. An archive is read to its end, as the checksum
    of a gzip file is in its last eight bytes.

    Raises:
        ValueError: there is none.
        DAMAGE: the archive is truncated or corrupt.
    """
    path = unpacked(archive, name) if archive.is_dir() else archive
    missing = ValueError("is not there; expected a plain file of that name. Check the names.")
    if path is None:
        raise missing
    with bar.reading(f"read {path}", path) as raw:
        whole = unzipped(path.name, raw)
        if archive.is_dir() or path.name == f"{name}.gz":
            yield whole
            return
        with tarfile.open(fileobj=whole, mode="r|") as tar:
            for entry in tar:
                if entry.isreg() and entry.name.removeprefix("./") in (name, f"{name}.gz"):
                    yield unzipped(entry.name, tar.extractfile(entry))  # type: ignore[arg-type]
                    break
            else:
                raise missing
        while whole.read(BLOCK):
            pass


def write(text: IO[bytes], out: IO[bytes], kind: str, straight: bool, errors: str) -> str:
    """Write a member's text, and say in words what it was; lines end with LF or CRLF, which is read as LF.

    Raises:
        ValueError: it is not UTF-8, or nothing is left of it.
    """
    count = returns = invalid = 0
    for number, raw in enumerate(text, start=1):
        raw = raw.removesuffix(b"\n")
        returns += raw.endswith(b"\r")
        raw = raw.removesuffix(b"\r")
        try:
            line = raw.decode("utf-8", errors)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"line {number} is not UTF-8 (byte 0x{raw[error.start]:02x} at column {error.start + 1}). Convert it, "
                "for instance with iconv -f latin1 -t utf-8, or give INVALID=replace to put U+FFFD there."
            ) from None
        invalid += "\ufffd" in line
        if (kept := stripped(line, kind)) is not None:
            out.write((kept.replace("\u2019", "'") if straight else kept).encode("utf-8") + b"\n")
            count += 1
    if not count:
        raise ValueError(f"no line is left of it as {kind}. Check the name, its kind, and the archive.")
    return f"{count} lines, {returns} that ended with CRLF, {invalid} with U+FFFD"


def check_sum(text: Path, name: str, sums: Path) -> None:
    """Is the text the published one?

    Raises:
        ValueError: its SHA-256 is not the one that the file of checksums has for it.
    """
    listed = dict(line.split("  ", 1)[::-1] for line in read_lines(sums) if "  " in line)
    if (found := digest(text, "sha256")) != listed.get(name):
        raise ValueError(
            f"{name}: its text has SHA-256 {found}, expected {listed.get(name)} ({sums}). It is not the published "
            "text: remove it, and fetch it again."
        )


def extract(
    archive: Path,
    names: Sequence[str],
    out: Path,
    kind: str = "plain",
    straight: bool = False,
    invalid: str = "refuse",
    sums: Path | None = None,
    table: Path | None = None,
) -> None:
    """Write a text out of members of an archive, whole or not at all.

    Args:
        archive: a .tgz, .tar or .gz, or a folder that was unpacked.
        names: paths in it, without .gz.
        kind: what they are: plain, tags or segments.
        straight: turn U+2019 into an apostrophe.
        invalid: refuse bytes that are not UTF-8, or replace them.
        sums: SHA-256 of the text, by the first member's name, as sha256sum writes it.
        table: check the archive against its row of this table, if it has one.

    Raises:
        ValueError: the archive or a text is faulty.
    """
    row = read_table(table).get(archive.name) if table and archive.is_file() else None
    if row:
        try:
            check(str(archive), archive, row)
        except ValueError as error:
            raise ValueError(f"{error} ({table}). Fetch it again, or leave DATA out.") from None
    with replacing(out) as part:
        with part.open("wb") as file:
            for name in names:
                try:
                    with member(archive, name) as text:
                        said = write(text, file, kind, straight, "replace" if invalid == "replace" else "strict")
                except DAMAGE as error:
                    said = f"found a truncated or corrupt archive ({error}). Fetch that file again."
                    raise ValueError(f"{archive}: {said}") from None
                except ValueError as error:
                    raise ValueError(f"{archive}: {name}: {error}") from None
                log.info("%s: %s: %s", archive, name, said)
        if sums:
            check_sum(part, Path(names[0]).name, sums)
