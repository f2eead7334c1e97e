"""Download one archive from its addresses, in order, and check it before it takes its name.

A table has sizes and checksums. An interrupted download continues. Without a checksum, it continues only from a server
whose file has the time (Last-Modified) of the first part, and this only checks that the download can be read. A hash of
its content is part of the text's key, so a changed archive is noticed.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
from collections.abc import Iterable
from email.utils import mktime_tz, parsedate_tz
from pathlib import Path

import requests
from requests.adapters import HTTPAdapter
from tqdm import tqdm
from urllib3.exceptions import HTTPError, ReadTimeoutError
from urllib3.util import Retry

from recipes.steps.bar import bar
from recipes.steps.guard import locked
from recipes.steps.table import Archive, check, read_table

log = logging.getLogger(__name__)
size = functools.partial(tqdm.format_sizeof, suffix="B")
BLOCK = 1 << 16
TIMEOUT = (10.0, 60.0)
"""Seconds to wait for a connection, and for an answer or more of it."""
RETRY = Retry(3, read=0, backoff_factor=2.5, status_forcelist=(429, 500, 502, 503, 504), raise_on_status=False,
              respect_retry_after_header=False)  # fmt: skip
"""Retries of a request if a server cannot be reached or is busy, all within a minute. A silent server is asked once."""


def kept(part: Path, archive: Archive) -> int:
    """Bytes of a partial download that can be continued. Without a checksum, it must have its server's time."""
    return part.stat().st_size if part.is_file() and (archive.checksum or part.stat().st_mtime) else 0


def disk_space(archives: Iterable[Archive], folder: Path, text: float) -> tuple[int, int]:
    """Bytes still to download, and bytes of the text made from all archives. Archives of unknown size are left out.

    Args:
        text: size of the text divided by the size of the archive.
    """
    rows = list(archives)
    missing = [row for row in rows if row.size and not (folder / row.name).is_file()]
    downloads = sum((row.size or 0) - kept(folder / f"{row.name}.part", row) for row in missing)
    return downloads, round(text * sum(row.size or 0 for row in rows))


def receive(session: requests.Session, url: str, part: Path, archive: Archive) -> None:
    """Complete a partial download with one request. Its file gets the server's time, or the time 0.

    Raises:
        RequestException: the download is incomplete.
    """
    if (have := kept(part, archive)) and have == archive.size:
        return
    # Ask for the .tgz itself, not for its content.
    headers = {"User-Agent": "fairseq-admin", "Accept-Encoding": "identity"}
    headers |= {"Range": f"bytes={have}-"} if have else {}
    with session.get(url, headers=headers, stream=True, timeout=TIMEOUT) as response:
        if response.status_code == requests.codes.requested_range_not_satisfiable:
            part.unlink()  # it is longer than the archive
        response.raise_for_status()
        have = have if response.status_code == requests.codes.partial else 0
        modified = parsedate_tz(response.headers.get("Last-Modified"))
        time = mktime_tz(modified) if modified else 0
        if have and not archive.checksum and time != part.stat().st_mtime:
            part.unlink()  # it may be of another file, which no checksum would show
            return receive(session, url, part, archive)
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else archive.size or 0
        fault = ""
        with part.open("ab" if have else "wb", buffering=0) as out, bar(archive.name, total or None, have) as shown:
            try:
                # Some servers declare a .tgz as a compressed .tar, which requests would decompress.
                while data := response.raw.read1(BLOCK, decode_content=False):
                    out.write(data)
                    shown.update(len(data))
            except HTTPError as error:
                fault = "fell silent" if isinstance(error, ReadTimeoutError) else "broke off"
            finally:
                os.utime(part, (time, time))
    have = part.stat().st_size
    if fault or have < total:
        raise requests.ConnectionError(f"{url}: {fault or 'broke off'} after {have} of {total or '?'} bytes")


def fetch(archive: Archive, part: Path) -> None:
    """Try one address after the other, each for as long as requests make progress.

    Raises:
        ValueError: no address has the file.
    """
    session, reasons = requests.Session(), {}
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(max_retries=RETRY))
    for url in archive.urls:
        before = -1
        while before != (before := kept(part, archive)):
            try:
                receive(session, url, part, archive)
                return check(url, part, archive)
            except requests.RequestException as error:
                reasons[url] = str(error)
            except ValueError as error:
                part.unlink()  # the part may begin with bytes of another address or of an older file
                reasons[url] = str(error)
            log.info("%s: %s", archive.name, reasons[url])
    if not (have := kept(part, archive)):
        part.unlink(missing_ok=True)
    hint = f"Run again{f' ({have} bytes are kept)' if have else ''}, or download {archive.name} yourself and give its"
    raise ValueError(f"{'; '.join(reasons.values())}. {hint} folder with DATA=DIR.")


def download(out: Path, table: Path, names: Iterable[str] = (), text: float = 0) -> None:
    """Fetch the archive named `out.name`, unless the file exists and is right.

    Args:
        table: names, sizes, checksums and addresses.
        names: all archives of the text, by default this one. The disk must have room for them and for the text.
        text: see `disk_space`.

    Raises:
        ValueError: the table does not name the archive, no address has it, or the disk is too small.
    """
    rows = read_table(table)
    if out.name not in rows:
        raise ValueError(f"{out.name}: not in {table}; expected one of {', '.join(rows)}.")
    archive, part = rows[out.name], out.with_name(f"{out.name}.part")
    # Two processes would write to the same partial file.
    with locked(out.with_name(f".{out.name}.guard")):
        if out.is_file():
            try:
                return check(str(out), out, archive)
            except ValueError as error:
                log.info("%s; fetching it again", error)
        wanted = [rows[name] for name in names or [out.name] if name in rows]
        downloads, texts = disk_space(wanted, out.parent, text)
        if downloads + texts > (free := shutil.disk_usage(out.parent).free):
            raise ValueError(
                f"{out.parent}: found {size(free)} free, expected {size(downloads)} for archives and about "
                f"{size(texts)} for the text. Make room, or give RUNS= elsewhere."
            )
        fetch(archive, part)
        part.replace(out)
