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
import shutil
import time
from pathlib import Path

import requests
from requests import codes
from tqdm import tqdm
from urllib3.exceptions import HTTPError

from recipes.steps import lock
from recipes.steps.bar import bar
from recipes.steps.common import run
from recipes.steps.guard import alone
from recipes.steps.table import Archive, check, digest, read_table

log = logging.getLogger(__name__)
TABLE = Path(__file__).parents[1] / "archives.tsv"
BLOCK = 1 << 16
# A try that brought less than this counts as one without progress.
PROGRESS = 1 << 20
# Train texts of WMT'14 fr-en are 14.8 GB, from archives of 6.7 GB (Hugging Face's dataset_infos.json of wmt14).
TEXTS = 2.2


class Failed(Exception):
    """An address did not give the archive; `again`: it may the next time."""

    def __init__(self, reason: str, again: bool):
        super().__init__(reason)
        self.again = again


def kept(part: Path, archive: Archive) -> int:
    """Bytes of the part that a request may add to: none where no checksum would find a wrong beginning."""
    return part.stat().st_size if archive.checksum and part.is_file() else 0


def receive(url: str, part: Path, archive: Archive, timeout: float) -> None:
    """Bring the part to its end with one request, from where it is, and check it.

    Raises:
        Failed: it is not whole, or not the archive; what may be added to stays.
        ValueError: there is too little room on the disk.
    """
    have = kept(part, archive)
    # A .tgz is what is wanted, not what is in it.
    headers = {"User-Agent": "fairseq-admin", "Accept-Encoding": "identity"}
    headers |= {"Range": f"bytes={have}-"} if have else {}
    if not have or have != archive.size:
        try:
            with requests.get(url, headers=headers, stream=True, timeout=timeout) as response:
                store(response, part, have, archive)
        except (requests.RequestException, HTTPError) as error:
            raise Failed(str(error), again=not isinstance(error, (requests.exceptions.InvalidSchema))) from None
    try:
        check(url, part, archive)
    except ValueError as error:
        part.unlink()
        # Its beginning may be another address's file, or an older one.
        raise Failed(str(error).removeprefix(f"{url}: "), again=have > 0) from None


def store(response: requests.Response, part: Path, have: int, archive: Archive) -> None:
    """Add the answer to the part, or begin it again. Raises as `receive` does."""
    status = response.status_code
    if status == codes.requested_range_not_satisfiable:
        part.unlink()
        raise Failed("what was kept is longer than the file", again=True)
    if status not in (codes.ok, codes.partial):
        raise Failed(f"the server answers {status} {response.reason}", again=status >= 500 or status == 429)
    have = have if status == codes.partial else 0
    length = response.headers.get("Content-Length")
    total = have + int(length) if length else archive.size
    if archive.size not in (None, total):
        raise Failed(f"the server announces {total} bytes, expected {archive.size}", again=False)
    free, missing, texts = shutil.disk_usage(part.parent).free, (total or 0) - have, (total or 0) * TEXTS
    if missing > free:
        found, wanted, more = (tqdm.format_sizeof(count, "B") for count in (free, missing, texts))
        raise ValueError(
            f"{part.parent}: found {found} free, expected {wanted} for {archive.name}, and up to about {more} more for "
            "the texts extracted from it. Make room, or write elsewhere."
        )
    with part.open("ab" if have else "wb") as out, bar(archive.name, total, have) as shown:
        # Bytes as they are sent: some servers call a .tgz a compressed .tar, which requests would decompress.
        while data := response.raw.read1(BLOCK, decode_content=False):
            out.write(data)
            shown.update(len(data))
    if total not in (None, part.stat().st_size):
        raise Failed(f"broke off after {part.stat().st_size} of {total} bytes", again=True)


def fetch(archive: Archive, part: Path, args: argparse.Namespace) -> None:
    """Try one address after the other, each until `args.tries` tries in a row bring nothing.

    Raises:
        ValueError: none has the file.
    """
    failures = []
    for url in archive.urls:
        tries, again, reason = 0, True, ""
        while again and tries < args.tries:
            before = kept(part, archive)
            try:
                return receive(url, part, archive, args.timeout)
            except Failed as failed:
                tries = 1 if kept(part, archive) >= before + PROGRESS else tries + 1
                again, reason = failed.again, f"{url}: {failed}"
                log.info("%s: %s", archive.name, reason)
                time.sleep(args.wait * 2 ** (tries - 1) if again and tries < args.tries else 0)
        failures.append(reason)
    have = kept(part, archive)
    if not have:
        part.unlink(missing_ok=True)
    hint = f"Run again{f' ({have} bytes are kept)' if have else ''}, or download {archive.name} yourself and give its"
    raise ValueError(f"{'; '.join(failures)}. {hint} folder with DATA=DIR.")


def get(archive: Archive, out: Path, args: argparse.Namespace) -> None:
    """Fetch the archive, unless it is there; without a checksum, hold it to what was recorded at its first use."""
    record, part = out.with_name("archives.lock.json"), out.with_name(f"{out.name}.part")
    unknown = archive.checksum is None and not archive.text_checked
    if unknown and (known := lock.recorded(record, "archives", archive.name)):
        archive = archive._replace(size=known["bytes"], checksum=f"sha256:{known['sha256']}")
    # An archive whose text alone can be checked is not taken on trust.
    if out.is_file() and not archive.text_checked:
        try:
            check(str(out), out, archive)
            return log.info("%s: there already", out)
        except ValueError as error:
            log.info("%s; fetching it again", error)
    fetch(archive, part, args)
    if unknown:
        found = {"bytes": part.stat().st_size, "sha256": digest(part, "sha256")}
        lock.hold(record, "archives", archive.name, found)
        log.info("%s: SHA-256 %s, recorded in %s", archive.name, found["sha256"], record)
    os.replace(part, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", help="a name in the table")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--table", type=Path, default=TABLE, help="sizes, checksums, addresses (default: %(default)s)")
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
        archive = archive._replace(urls=(f"{args.url.rstrip('/')}/{args.name}",))
    # Two at once would write to one part.
    with alone(args.out.with_name(f".{args.out.name}.guard")):
        get(archive, args.out, args)


if __name__ == "__main__":
    run(main)
