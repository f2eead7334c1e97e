"""Extract members of an archive into one text file, in the order they are named.

    python -m recipes.steps.extract europarl-v7.tgz training/europarl-v7.de-en.de --as plain -o europarl.de
    python -m recipes.steps.extract de-en.tgz de-en/train.tags.de-en.de --as tags -o train.de
    python -m recipes.steps.extract test-full.tgz test-full/newstest2014-deen-ref.de.sgm --as segments -o test.de

`tags` and `segments` keep and strip what fairseq's prepare-iwslt14.sh and prepare-wmt14en2de.sh do:

    tags      lines with <url>, <talkid> or <keywords> go; the tags <title> and <description> go, their text stays
    segments  only lines with <seg id stay, without the tag and the white space at its ends

Entities (&amp;) stay: those scripts leave them, and so does sacreBLEU's own newstest2014; its tokeniser 13a reads them.
Those scripts make U+2019 an apostrophe in segments. Here that takes --straight-apostrophe: a reference stays as it is.
"""

from __future__ import annotations

import argparse
import gzip
import logging
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from recipes.steps import bar, inputs
from recipes.steps.common import read_lines, replacing, run
from recipes.steps.table import DAMAGE, check, digest, read_table

log = logging.getLogger(__name__)
BLOCK = 1 << 20
DROPPED = ("<url>", "<talkid>", "<keywords>")
TAGS = re.compile("</?(?:title|description)>")
# White space is what sed takes for it in these files; no-break spaces belong to the text.
OPENING = re.compile(r'<seg id="[0-9]*">[ \t\r\f\v]*')
CLOSING = re.compile(r"[ \t\r\f\v]*</seg>[ \t\r\f\v]*")


def plain(line: str) -> str | None:
    return line


def tags(line: str) -> str | None:
    """The line without tags, or None if it is metadata."""
    return None if any(tag in line for tag in DROPPED) else TAGS.sub("", line)


def segments(line: str) -> str | None:
    """The segment's text, or None if the line has none.

    Raises:
        ValueError: it ends on another line.
    """
    if "<seg id" not in line:
        return None
    if "</seg>" not in line:
        raise ValueError(f"{line[:60]!r} has no </seg>, expected one per line. Check the archive.")
    return CLOSING.sub("", OPENING.sub("", line))


KINDS: dict[str, Callable[[str], str | None]] = {"plain": plain, "tags": tags, "segments": segments}


def members(archive: Path, names: Sequence[str]) -> Iterator[tuple[str, IO[bytes]]]:
    """The named members, each to be read before the next, in the order of the archive.

    No path from an archive is written to, and no link in it is followed. A member that is itself compressed (NAME.gz)
    is found as NAME. An archive is read to its end, as the checksum of a gzip file is in its last eight bytes.

    Raises:
        DAMAGE: it is truncated or corrupt.
    """
    if archive.is_dir():
        for name in names:
            if path := inputs.unpacked(archive, name):
                with bar.reading(f"read {path}", path) as raw:
                    yield name, unzipped(path.name, raw)
        return
    with bar.reading(f"read {archive}", archive) as raw:
        if archive.suffix == ".gz" and not archive.name.endswith(".tar.gz"):
            yield archive.stem, unzipped(archive.name, raw)
            return
        whole = raw if archive.suffix == ".tar" else unzipped(".gz", raw)
        with tarfile.open(fileobj=whole, mode="r|") as tar:
            for entry in tar:
                name = entry.name.removeprefix("./")
                name = name if name in names else name.removesuffix(".gz")
                if name in names and entry.isreg():
                    yield name, unzipped(entry.name, tar.extractfile(entry))  # type: ignore[arg-type]
        while whole.read(BLOCK):
            pass


def unzipped(name: str, file: IO[bytes]) -> IO[bytes]:
    """The text of a file that is compressed if its name says so."""
    return gzip.GzipFile(fileobj=file, mode="rb") if name.endswith(".gz") else file  # type: ignore[return-value]


def write(where: str, text: IO[bytes], out: IO[bytes], args: argparse.Namespace) -> None:
    """Write a member's text; lines end with LF or CRLF, which is read as LF.

    Raises:
        ValueError: it is not UTF-8, or nothing is left of it.
    """
    count = returns = invalid = 0
    for number, raw in enumerate(text, start=1):
        raw = raw.removesuffix(b"\n")
        returns += raw.endswith(b"\r")
        raw = raw.removesuffix(b"\r")
        try:
            line = raw.decode("utf-8", "replace" if args.invalid == "replace" else "strict")
            kept = KINDS[args.kind](line)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{where}: line {number} is not UTF-8 (byte 0x{raw[error.start]:02x} at column {error.start + 1}). "
                "Convert it, for instance with iconv -f latin1 -t utf-8, or give INVALID=replace to put U+FFFD there."
            ) from None
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        invalid += "\ufffd" in line
        if kept is not None:
            out.write((kept.replace("\u2019", "'") if args.straight_apostrophe else kept).encode("utf-8") + b"\n")
            count += 1
    if not count:
        raise ValueError(f"{where}: no line is left of it as {args.kind}. Check the name, --as, and the archive.")
    log.info("%s: %d lines, %d that ended with CRLF, %d with U+FFFD", where, count, returns, invalid)


def extract(archive: Path, names: Sequence[str], part: Path, args: argparse.Namespace) -> None:
    """Write the members to the part in the order of `names`; each waits in a file of its own for those before.

    Raises:
        ValueError: the archive or a text is faulty.
    """
    waiting = {name: part.with_name(f"{part.name}.{number}") for number, name in enumerate(names)}
    try:
        for name, text in members(archive, names):
            if name in names:
                with waiting[name].open("wb") as out:
                    write(f"{archive}: {name}", text, out, args)
        missing = [name for name, path in waiting.items() if not path.exists()]
        if missing:
            raise ValueError(f"{archive}: holds no {missing[0]}, expected a plain file of that name. Check the names.")
        first, *others = waiting.values()
        with first.open("ab") as out:
            for path in others:
                with path.open("rb") as side:
                    shutil.copyfileobj(side, out)
        first.replace(part)
    except DAMAGE as error:
        raise ValueError(f"{archive}: found a truncated or corrupt archive ({error}). Fetch that file again.") from None
    finally:
        for path in waiting.values():
            path.unlink(missing_ok=True)


def check_sum(part: Path, name: str, sums: Path) -> None:
    """Is the text the published one?

    Raises:
        ValueError: its SHA-256 differs, or the file of checksums has none for it.
    """
    listed = dict(line.split("  ", 1)[::-1] for line in read_lines(sums) if "  " in line)
    if name not in listed:
        raise ValueError(f"{sums}: has no checksum of {name}; expected a line as sha256sum writes it.")
    found = digest(part, "sha256")
    if found != listed[name]:
        raise ValueError(
            f"{name}: its text has SHA-256 {found}, expected {listed[name]} ({sums}). It is not the published text: "
            "remove it, and fetch it again."
        )


def sources(archive: Path, names: Sequence[str], record: Path, table: Path | None) -> dict[str, inputs.Input]:
    """The files that will be read, as they are now: the archive, or what was unpacked from it.

    Args:
        record: what was recorded of them before. A file known from there is not checked again.
        table: the table that an archive's checksum is in.

    Raises:
        ValueError: the archive is another than the table's.
    """
    if archive.is_file():
        paths = {archive.name: archive}
    else:
        paths = {name: path for name in names if (path := inputs.unpacked(archive, name))}
    known = inputs.read(record)
    now = {name: inputs.describe(path, known.get(name)) for name, path in paths.items()}
    row = read_table(table).get(archive.name) if table and archive.is_file() else None
    if row and now[archive.name] != known.get(archive.name):
        try:
            check(str(archive), archive, row)
        except ValueError as error:
            raise ValueError(f"{error} ({table}). Fetch it again, or leave DATA out.") from None
    return now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("archive", type=Path, help=".tgz, .tar, .gz, or a folder that was unpacked")
    parser.add_argument("members", nargs="+", help="paths in it, without .gz")
    parser.add_argument("--as", dest="kind", choices=KINDS, required=True, help="what they are")
    parser.add_argument("-o", "--out", type=Path, required=True, help="the text to write")
    parser.add_argument("--straight-apostrophe", action="store_true", help="turn U+2019 into an apostrophe")
    parser.add_argument("--invalid", choices=("refuse", "replace"), default="refuse", help="bytes that are not UTF-8")
    parser.add_argument("--sums", type=Path, help="SHA-256 of the text, by the member's name, as sha256sum writes it")
    parser.add_argument("--record", type=Path, help="record there which files were read")
    parser.add_argument("--check", type=Path, metavar="TABLE", help="check an archive against its row of this table")
    args = parser.parse_args()

    read = sources(args.archive, args.members, args.record, args.check) if args.record else {}
    with replacing(args.out) as part:
        extract(args.archive, args.members, part, args)
        if args.sums:
            check_sum(part, Path(args.members[0]).name, args.sums)
    if read:
        inputs.write(args.record, read)


if __name__ == "__main__":
    run(main)
