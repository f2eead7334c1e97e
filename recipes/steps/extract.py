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
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from recipes.steps import inputs, lock
from recipes.steps.common import read_lines, replacing, run
from recipes.steps.disk import full, room
from recipes.steps.download import check
from recipes.steps.members import DAMAGE, Member, damaged, members, unpacked
from recipes.steps.table import digest, read_table

log = logging.getLogger(__name__)

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
    """The segment's text, or None if the line has none."""
    return CLOSING.sub("", OPENING.sub("", line)) if "<seg id" in line else None


KINDS: dict[str, Callable[[str], str | None]] = {"plain": plain, "tags": tags, "segments": segments}


def decoded(where: str, lines: IO[bytes], replace: bool) -> Iterator[str]:
    """Lines without their ends, which are LF or CRLF.

    Raises:
        ValueError: a line is not UTF-8, and `replace` is not set.
    """
    returns = invalid = 0
    for number, line in enumerate(lines, start=1):
        if line.endswith(b"\n"):
            line = line[:-1]
        if line.endswith(b"\r"):
            line = line[:-1]
            returns += 1
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            if not replace:
                byte = f"0x{line[error.start]:02x}"
                raise ValueError(
                    f"{where}: line {number} is not UTF-8 (byte {byte} at column {error.start + 1}). Convert it, for "
                    "instance with iconv -f latin1 -t utf-8, or give this step --invalid replace to put U+FFFD there."
                ) from None
            invalid += 1
            yield line.decode("utf-8", errors="replace")
    if returns:
        log.info("%s: read CRLF as LF at the end of %d lines", where, returns)
    if invalid:
        log.info("%s: put U+FFFD into %d lines that are not UTF-8", where, invalid)


def write(archive: Path, member: Member, out: IO[bytes], args: argparse.Namespace) -> int:
    """Append the member's text; returns the number of lines.

    Raises:
        ValueError: it is not UTF-8, or nothing is left of it.
    """
    where = f"{archive}: {member.name}"
    count, take = 0, KINDS[args.kind]
    for text in decoded(where, member.text, args.invalid == "replace"):
        kept = take(text)
        if kept is None:
            continue
        if args.kind == "segments" and "</seg>" not in text:
            raise ValueError(f"{where}: {text[:60]!r} has no </seg>, expected one per line. Check the archive.")
        if args.straight_apostrophe:
            kept = kept.replace("\u2019", "'")
        out.write(kept.encode("utf-8") + b"\n")
        count += 1
    if not count:
        raise ValueError(f"{where}: no line is left of it as {args.kind}. Check the name, --as, and the archive.")
    return count


def extract(archive: Path, names: Sequence[str], part: Path, args: argparse.Namespace) -> dict[str, int]:
    """Write the members to the part in the order of `names`; returns the lines of each.

    One that comes too early in the archive waits in its own file.

    Raises:
        ValueError: the archive or a text is faulty, or the disk is full.
    """
    counts: dict[str, int] = {}
    waiting: dict[str, Path] = {}
    todo = list(names)
    try:
        with part.open("wb") as out:
            for member in members(archive, names):
                room(part.parent, member.size, member.name)
                if member.name == todo[0]:
                    counts[member.name] = write(archive, member, out, args)
                    todo.pop(0)
                else:
                    waiting[member.name] = part.with_name(f"{part.name}.{names.index(member.name)}")
                    with waiting[member.name].open("wb") as side:
                        counts[member.name] = write(archive, member, side, args)
                while todo and todo[0] in waiting:
                    with waiting[todo[0]].open("rb") as side:
                        shutil.copyfileobj(side, out)
                    waiting.pop(todo.pop(0)).unlink()
    except DAMAGE as error:
        raise damaged(unpacked(archive, member.name) or archive if archive.is_dir() else archive, error) from None
    except OSError as error:
        raise full(part.parent, error) from None
    finally:
        for path in waiting.values():
            path.unlink(missing_ok=True)
    return counts


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
        paths = {name: path for name in names if (path := unpacked(archive, name))}
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
    parser.add_argument("--lock", type=Path, help="record each member's number of lines there, and check it later")
    parser.add_argument("--record", type=Path, help="record there which files were read")
    parser.add_argument("--check", type=Path, metavar="TABLE", help="check an archive against its row of this table")
    args = parser.parse_args()
    if len(set(args.members)) < len(args.members):
        raise ValueError(f"{' '.join(args.members)}: a member comes twice, expected each once.")
    if args.sums and len(args.members) > 1:
        raise ValueError(f"--sums: found {len(args.members)} members, expected one. Extract one at a time.")

    read = sources(args.archive, args.members, args.record, args.check) if args.record else {}
    with replacing(args.out) as part:
        counts = extract(args.archive, args.members, part, args)
        if args.sums:
            check_sum(part, Path(args.members[0]).name, args.sums)
        for name in args.members:
            log.info("%s: %d lines of %s", args.out, counts[name], name)
            if args.lock:
                lock.hold(args.lock, "lines", f"{args.archive.name}: {name}, {args.kind}", counts[name])
    if read:
        inputs.write(args.record, read)


if __name__ == "__main__":
    run(main)
