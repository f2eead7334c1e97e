"""One HTTP request that brings a part of an archive nearer to its end.

A part goes on where it stopped if a checksum is known, which tells in the end whether it fits; nothing else is noted of
where it came from.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import BinaryIO

import requests
from requests import codes
from tqdm import tqdm
from urllib3.exceptions import HTTPError, ReadTimeoutError

from recipes.steps.bar import bar
from recipes.steps.disk import room, size
from recipes.steps.table import Archive, page

BLOCK = 1 << 16
# Below this many bytes a second, over a whole time-out, a transfer counts as stalled.
SLOWEST = 100
# Train texts of WMT'14 fr-en are 14.8 GB, from archives of 6.7 GB (Hugging Face's dataset_infos.json of wmt14).
TEXTS = 2.2


class Failed(Exception):
    """A request did not bring the file; its text says why, without a final stop.

    Attributes:
        final: asking the same address again is of no use.
    """

    def __init__(self, reason: str, final: bool = False):
        super().__init__(reason)
        self.final = final


def kept(part: Path, archive: Archive) -> int:
    """Bytes of the part that a request may add to: none where no checksum would find a wrong beginning."""
    return part.stat().st_size if archive.checksum and part.is_file() else 0


def receive(url: str, part: Path, archive: Archive, timeout: float) -> bool:
    """Bring the part to its end with one request; whether it goes on from what earlier ones brought.

    Args:
        timeout: seconds without an answer, or of a stalled transfer, until it fails.

    Raises:
        Failed: the file is not whole; what has come stays in the part.
        ValueError: there is too little room on the disk.
    """
    have = kept(part, archive)
    if have and have == archive.size:
        return True
    with request(url, have, timeout) as response:
        status = response.status_code
        if have and status == codes.requested_range_not_satisfiable:
            part.unlink()
            return receive(url, part, archive, timeout)
        if status not in (codes.ok, codes.partial):
            again = status >= 500 or status in (codes.request_timeout, codes.too_many_requests)
            raise Failed(f"the server answers {status} {response.reason}", final=not again)
        if status == codes.ok:
            have = 0
        total = announced(response, have, archive)
        missing = None if total is None else total - have
        texts = f", and up to about {size((archive.size or total or 0) * TEXTS)} more for the texts extracted from it"
        room(part.parent, missing, archive.name + texts)
        with part.open("ab" if have else "wb") as out, bar(archive.name, total, have) as shown:
            broken = copy(response, out, shown, timeout)
    got = part.stat().st_size
    if total is None and broken or total not in (None, got):
        raise Failed(f"{broken or 'broke off'} after {got}{f' of {total}' if total else ''} bytes")
    return have > 0


def request(url: str, have: int, timeout: float) -> requests.Response:
    """The server's answer, its body to be read.

    Raises:
        Failed: there is none.
    """
    # A .tgz is what is wanted, not what is in it.
    headers = {"User-Agent": "fairseq-admin", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        return requests.get(url, headers=headers, stream=True, timeout=timeout)
    except requests.Timeout:
        raise Failed(f"no answer for {timeout:g} s") from None
    except requests.RequestException as error:
        raise Failed(innermost(error), final=not isinstance(error, requests.ConnectionError)) from None


def innermost(error: BaseException) -> str:
    """What the operating system said, without the names that the libraries wrap around it."""
    while error.__context__:
        error = error.__context__
    return str(error) or type(error).__name__


def announced(response: requests.Response, have: int, archive: Archive) -> int | None:
    """The whole file's size, if it is known.

    Raises:
        Failed: what the server is about to send is a page, or has another size than the archive.
    """
    if response.headers.get("Content-Type", "").startswith("text/html"):
        try:
            start = response.raw.read(4096, decode_content=True)
        except HTTPError:
            start = b""
        raise Failed(f"found {page(start) or 'a page of type text/html'}, expected an archive", final=True)
    length = response.headers.get("Content-Length", "")
    total = have + int(length) if length.isdecimal() else archive.size
    if archive.size not in (None, total):
        raise Failed(f"the server announces {total} bytes, expected {archive.size}", final=True)
    return total


def copy(response: requests.Response, out: BinaryIO, shown: tqdm, timeout: float) -> str:
    """Write the body as it comes; how it ended before its time, if it did.

    Raises:
        OSError: the disk is full.
    """
    since, count = time.monotonic(), 0
    try:
        # Bytes as they are sent: some servers call a .tgz a compressed .tar, which requests would decompress.
        while data := response.raw.read1(BLOCK, decode_content=False):
            out.write(data)
            shown.update(len(data))
            count += len(data)
            now = time.monotonic()
            if now - since > timeout:
                if count < SLOWEST * (now - since):
                    return f"stalled ({count} bytes in {now - since:.0f} s)"
                since, count = now, 0
    except ReadTimeoutError:
        return f"stalled (no answer for {timeout:g} s)"
    except HTTPError:
        return "broke off"
    return ""
