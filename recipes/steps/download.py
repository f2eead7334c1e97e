"""Get one archive from its addresses, in order; checked before it takes its name.

    python -m recipes.steps.download test-full.tgz --out data/archives/test-full.tgz

Interrupted, it goes on where it stopped, if the archive's checksum is known. Size and checksum come from
recipes/archives.tsv; what that does not know is recorded in archives.lock.json next to the archive the first time, and
held from then on.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from pathlib import Path

from recipes.steps import lock
from recipes.steps.common import run
from recipes.steps.disk import full, size
from recipes.steps.guard import alone
from recipes.steps.members import check_whole
from recipes.steps.table import Archive, check_start, check_url, digest, read_table
from recipes.steps.transfer import Failed, kept, receive

log = logging.getLogger(__name__)
TABLE = Path(__file__).parents[1] / "archives.tsv"
# A try that brought less than this counts as one without progress.
PROGRESS = 1 << 20


def held(archive: Archive, lock_file: Path) -> Archive:
    """The row, completed by what was recorded of the archive."""
    known = lock.recorded(lock_file, "archives", archive.name)
    if archive.checksum is not None or archive.text_checked or known is None:
        return archive
    return archive._replace(size=known["bytes"], checksum=f"sha256:{known['sha256']}", recorded=lock_file)


def check(where: str, path: Path, archive: Archive) -> None:
    """Is the file the archive, as far as is known?

    Raises:
        ValueError: it is not; the message has no final stop.
    """
    kind = Path(archive.name).suffix
    check_start(where, path, kind)
    found = path.stat().st_size
    source = ""
    if archive.recorded:
        source = f", recorded in {archive.recorded} at its first use (if this one is right, remove its entry)"
    if archive.size is not None and found != archive.size:
        raise ValueError(f"{where}: found {found} bytes, expected {archive.size}{source}")
    if archive.checksum is not None:
        algorithm, _, expected = archive.checksum.partition(":")
        digits = digest(path, algorithm)
        if digits != expected:
            raise ValueError(f"{where}: found {algorithm} {digits}, expected {expected}{source}")
    else:
        check_whole(where, path, kind)


def record(path: Path, archive: Archive, lock_file: Path) -> None:
    """Trust on first use: hold the file to what it is now, if nothing better is known."""
    if archive.text_checked or (archive.checksum or "").startswith("sha256:"):
        return
    found = {"bytes": path.stat().st_size, "sha256": digest(path, "sha256")}
    new = lock.recorded(lock_file, "archives", archive.name) is None
    lock.hold(lock_file, "archives", archive.name, found)
    if new:
        log.info("%s: SHA-256 %s, recorded in %s", archive.name, found["sha256"], lock_file)


def from_address(url: str, archive: Archive, part: Path, args: argparse.Namespace) -> None:
    """Bring the whole, checked file from one address to the part, in as many tries as it takes.

    Raises:
        Failed: it cannot be had there.
    """
    tries, whole_again = 0, False
    while True:
        before = kept(part, archive)
        try:
            resumed = receive(url, part, archive, args.timeout)
        except Failed as failed:
            tries = 1 if kept(part, archive) >= before + PROGRESS else tries + 1
            if failed.final or tries >= args.tries:
                raise
            wait = args.wait * 2 ** (tries - 1)
            log.info("%s: %s: %s; again in %g s", archive.name, url, failed, wait)
            time.sleep(wait)
            continue
        try:
            return check(url, part, archive)
        except ValueError as error:
            part.unlink()
            if whole_again or not resumed:
                raise Failed(str(error).removeprefix(f"{url}: "), final=True) from None
        # Its beginning may be another address's file, or an older one.
        log.info("%s: what was kept of it does not fit; all of it from %s", archive.name, url)
        whole_again = True


def from_addresses(archive: Archive, part: Path, args: argparse.Namespace) -> None:
    """Try one address after the other.

    Raises:
        ValueError: none has the file.
    """
    failures = []
    for number, url in enumerate(archive.urls, start=1):
        try:
            return from_address(url, archive, part, args)
        except Failed as failed:
            failures.append(f"{url}: {failed}")
            if number < len(archive.urls):
                log.info("%s; next %s", failures[-1], archive.urls[number])
    have = kept(part, archive)
    if not have:
        part.unlink(missing_ok=True)
    hint = f"Run again{f' ({size(have)} are kept)' if have else ''}, or download {archive.name} yourself and give its"
    raise ValueError(f"{'; '.join(failures)}. {hint} folder with DATA=DIR.")


def already(out: Path, archive: Archive) -> bool:
    """Is the archive there? One whose text alone can be checked is not taken on trust."""
    if not out.is_file() or archive.text_checked:
        return False
    try:
        check(str(out), out, archive)
        return True
    except ValueError as error:
        log.info("%s; fetching it again", error)
        return False


def get(archive: Archive, args: argparse.Namespace) -> None:
    out = args.out
    archive = held(archive, args.lock)
    # Two at once would write to one part.
    with alone(out.with_name(f".{out.name}.guard")):
        if already(out, archive):
            record(out, archive, args.lock)
            log.info("%s: there already", out)
        else:
            part = out.with_name(f"{out.name}.part")
            from_addresses(archive, part, args)
            record(part, archive, args.lock)
            os.replace(part, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", help="a name in the table")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--table", type=Path, default=TABLE, help="sizes, checksums, addresses (default: %(default)s)")
    parser.add_argument("--lock", type=Path, help="where first uses are recorded (default: next to OUT)")
    parser.add_argument("--url", help="take URL/NAME instead of the table's addresses")
    parser.add_argument("--timeout", type=float, default=60, help="seconds without an answer (default: %(default)s)")
    parser.add_argument("--tries", type=int, default=4, help="without progress, an address (default: %(default)s)")
    parser.add_argument("--wait", type=float, default=5, help="seconds to the second try, doubled then (default: 5)")
    args = parser.parse_args()

    table = read_table(args.table)
    if args.name not in table:
        raise ValueError(f"{args.name}: not in {args.table}; expected one of {', '.join(table)}.")
    archive = table[args.name]
    if args.url:
        check_url("--url", args.url)
        archive = archive._replace(urls=(f"{args.url.rstrip('/')}/{args.name}",))
    args.lock = args.lock or args.out.with_name("archives.lock.json")
    try:
        get(archive, args)
    except OSError as error:
        raise full(args.out.parent, error, archive.size) from None


if __name__ == "__main__":
    run(main)
