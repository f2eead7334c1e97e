"""Extract members of an archive into one text file, in the order in which they are named.

The kinds `tags` and `segments` treat lines as fairseq's prepare-iwslt14.sh and prepare-wmt14en2de.sh do:

    tags      drop lines with <url>, <talkid> or <keywords>; remove the tags <title> and <description>, keep their text
    segments  keep only lines with <seg id; remove the tag, and white space next to it

Entities (&amp;) stay, as in those scripts and in sacreBLEU's newstest2014; sacreBLEU's tokeniser 13a decodes them. In
segments, the scripts turn U+2019 into an apostrophe. Here this happens only with `straight`, so that a reference stays
as it is.
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
from recipes.steps.common import decoded, read_lines, replacing_files
from recipes.steps.table import DAMAGE, check, digest, read_table

log = logging.getLogger(__name__)
BLOCK = 1 << 20
DROPPED = ("<url>", "<talkid>", "<keywords>")
TAGS = re.compile("</?(?:title|description)>")
# White space as sed defines it; no-break spaces belong to the text.
OPENING = re.compile(r'<seg id="[0-9]*">[ \t\r\f\v]*')
CLOSING = re.compile(r"[ \t\r\f\v]*</seg>[ \t\r\f\v]*")


def stripped(line: str, kind: str) -> str | None:
    """The text of a line in a file of this kind; None if the line is dropped.

    Raises:
        ValueError: a segment does not end on its line.
    """
    if kind == "plain":
        return line
    if kind == "tags":
        return None if any(tag in line for tag in DROPPED) else TAGS.sub("", line)
    if "<seg id" not in line:
        return None
    if "</seg>" not in line:
        raise ValueError(f"{line[:60]!r} has no </seg>, expected one per line. Check the archive.")
    return CLOSING.sub("", OPENING.sub("", line))


def unpacked(folder: Path, name: str) -> Path:
    """The path of a file in a folder, with .gz if the file is compressed.

    Raises:
        ValueError: the file exists both with .gz and without.
    """
    packed, plain = folder / f"{name}.gz", folder / name
    if packed.is_file() and plain.is_file():
        raise ValueError(f"{plain} and {packed.name} are there; expected one of them. Move the other away.")
    return packed if packed.is_file() else plain


def unzipped(name: str, file: IO[bytes]) -> IO[bytes]:
    """The content of a file, decompressed if its name ends in gz."""
    return gzip.GzipFile(fileobj=file, mode="rb") if name.endswith("gz") else file  # type: ignore[return-value]


@contextmanager
def member(archive: Path, name: str) -> Iterator[IO[bytes]]:
    """Open a text for reading: a member NAME or NAME.gz of a .tgz or .tar, a file in a folder, or a single .gz.

    No path from an archive is written to, and no link in an archive is followed. Archives are read to their end, since
    the checksum of a gzip file is in its last eight bytes.

    Raises:
        ValueError: the text is not there.
        DAMAGE: the archive is truncated or corrupt.
    """
    path = unpacked(archive, name) if archive.is_dir() else archive
    missing = ValueError(f"{name}: is not there; expected a plain file of that name. Check the names.")
    if not path.is_file():
        raise missing
    with bar.reading(f"read {path}", path) as raw:
        whole = unzipped(path.name, raw)
        if path.suffix not in (".tgz", ".tar"):
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


def lines(text: IO[bytes], name: str, replace: bool) -> Iterator[str]:
    """The lines of a text, which end in LF or CRLF.

    Args:
        replace: replace bytes that are not UTF-8 by U+FFFD.

    Raises:
        ValueError: a line is not UTF-8, and `replace` is off.
    """
    first = 1
    while block := text.readlines(BLOCK):
        try:
            rows = decoded(block, name, first, "replace" if replace else "strict")
        except ValueError as error:
            raise ValueError(f"{error} Or give PREPARE_ARGS='--invalid replace', which puts U+FFFD there.") from None
        yield from (line.removesuffix("\r") for line in rows)
        first += len(block)


def extract(
    archive: Path, names: Sequence[str], out: Path, kind: str = "plain", straight: bool = False,
    invalid: str = "refuse", sums: Path | None = None, table: Path | None = None,
) -> None:  # fmt: skip
    """Write members of an archive to one text, completely or not at all.

    Args:
        archive: an archive, folder or .gz, as `member` reads it.
        names: paths in the archive, without .gz.
        kind: kind of the members: plain, tags or segments.
        straight: turn U+2019 into an apostrophe.
        invalid: refuse bytes that are not UTF-8, or replace them.
        sums: file of SHA-256 sums, as sha256sum writes it. In it, the text has the name of the first member.
        table: table of archives. The archive is checked against its row, if it has one.

    Raises:
        ValueError: the archive or a text is faulty, or a checksum differs.
    """
    if table and archive.is_file() and (row := read_table(table).get(archive.name)):
        try:
            check(str(archive), archive, row)
        except ValueError as error:
            raise ValueError(f"{error} ({table}). Fetch it again, or leave DATA out.") from None
    with replacing_files(out) as (file,):
        for name in names:
            count = 0
            try:
                with member(archive, name) as text:
                    for line in lines(text, name, invalid == "replace"):
                        if (kept := stripped(line, kind)) is not None:
                            kept = kept.replace("\u2019", "'") if straight else kept
                            file.write(f"{kept}\n".encode())
                            count += 1
                if not count:
                    raise ValueError(f"{name}: no line is left of it as {kind}. Check the name, its kind, the archive.")
            except DAMAGE as error:
                fault = f"found a truncated or corrupt archive ({error}). Fetch that file again."
                raise ValueError(f"{archive}: {name}: {fault}") from None
            except ValueError as error:
                raise ValueError(f"{archive}: {error}") from None
            log.info("%s: %s: %d lines", archive, name, count)
        file.flush()
        listed = dict(line.split("  ", 1)[::-1] for line in read_lines(sums)) if sums else {}
        expected = listed.get(Path(names[0]).name)
        if sums and (digits := digest(Path(file.name), "sha256")) != expected:
            raise ValueError(
                f"{archive}: {names[0]}: its text has SHA-256 {digits}, expected {expected} ({sums}). It is not the "
                "published text: remove it, and fetch it again."
            )
