"""One HTTP request that brings a partial file nearer to its end.

Beside the part FILE lies FILE.json: the address it came from, the version (ETag, or else Last-Modified) and the whole
size. A part goes on where it stopped only if the server says that it still has that version (If-Range, RFC 9110 13.1.5,
from memory), or, from another address, if a published checksum will find out in the end. Otherwise it starts over.
"""

from __future__ import annotations

import errno
import http.client
import json
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

from recipes.steps.meter import Meter, size
from recipes.steps.table import refuse_page

BLOCK = 1 << 16
# Below this many bytes a second, over a whole time-out, a transfer counts as stalled.
SLOWEST = 100


class Failed(Exception):
    """A request did not bring the file; its text says why, without a final stop.

    Attributes:
        final: asking the same address again is of no use.
    """

    def __init__(self, reason: str, final: bool = False):
        super().__init__(reason)
        self.final = final


class Version(NamedTuple):
    """Where a part came from. `mixed`: from more than one address."""

    url: str
    validator: str | None
    total: int | None
    mixed: bool = False


def notes(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def version(part: Path) -> Version | None:
    """What is known of the part; None if there is none, or nothing is known of it."""
    try:
        found = Version(**json.loads(notes(part).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return found if part.is_file() and part.stat().st_size else None


def discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    notes(part).unlink(missing_ok=True)


def validator(headers: Any) -> str | None:
    """What names the version: a strong ETag, or else the time of the last change."""
    etag = headers.get("ETag")
    return etag if etag and not etag.startswith("W/") else headers.get("Last-Modified")


def whole_size(headers: Any, have: int) -> int | None:
    """The whole file's size, from a response that begins at byte `have`."""
    length = headers.get("Content-Length", "")
    return have + int(length) if length.isdecimal() else None


def request(url: str, timeout: float, headers: dict[str, str]) -> Any:
    """The server's answer.

    Raises:
        Failed: there is none, or it is an error; 416 among them is `final` False and says so.
    """
    asking = urllib.request.Request(url, headers={"User-Agent": "fairseq-admin", **headers})
    try:
        return urllib.request.urlopen(asking, timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        final = 300 <= error.code < 500 and error.code not in (408, 429)
        failed = Failed(f"the server answers {error.code} {error.reason}", final)
        failed.code = error.code  # type: ignore[attr-defined]
        raise failed from None
    except (OSError, http.client.HTTPException) as error:
        raise Failed(reason(error, timeout)) from None


def reason(error: BaseException, timeout: float) -> str:
    """Why a connection failed, in words. (socket.timeout is TimeoutError from Python 3.10 only.)"""
    cause = getattr(error, "reason", None) or error
    if "timed out" in str(cause):
        return f"no answer for {timeout:g} s"
    return str(cause) or type(cause).__name__


def attempt(
    url: str,
    part: Path,
    timeout: float,
    meter: Meter,
    expected: int | None = None,
    checked: bool = False,
    room: Callable[[int | None], None] = lambda missing: None,
) -> None:
    """Bring the part to its end with one request (two, if the server has another version than the part's).

    Args:
        timeout: seconds without an answer, or of a stalled transfer, until it fails.
        expected: the whole file's size, if it is known.
        checked: a checksum will be compared in the end, so parts of several addresses may be joined.
        room: called with the number of bytes to come, or None, before any is written; may raise.

    Raises:
        Failed: the file is not whole; what has come stays in the part.
        ValueError: the disk is full.
    """
    known = version(part)
    have = part.stat().st_size if known else 0
    headers = {"Accept-Encoding": "identity"}
    if known and have and known.total != have:
        if known.url == url and known.validator:
            headers.update({"Range": f"bytes={have}-", "If-Range": known.validator})
        elif checked and known.total is not None:
            headers.update({"Range": f"bytes={have}-"})
        else:
            known, have = None, 0
    elif known and known.total == have:
        return
    try:
        response = request(url, timeout, headers)
    except Failed as failed:
        if getattr(failed, "code", None) != 416 or not known:
            raise
        discard(part)
        return attempt(url, part, timeout, meter, expected, checked, room)
    with response:
        if response.status not in ((200, 206) if "Range" in headers else (200,)):
            raise Failed(f"the server answers {response.status} {response.reason}", final=True)
        if response.status == 206 and known:
            if not continues(response.headers, known, url, have):
                discard(part)
                return attempt(url, part, timeout, meter, expected, checked, room)
            new = known._replace(url=url, mixed=known.mixed or url != known.url)
            if url != known.url:
                new = new._replace(validator=validator(response.headers))
        else:
            have = 0
            new = Version(url, validator(response.headers), whole_size(response.headers, 0))
        if response.headers.get_content_type() == "text/html":
            page(response)
        if expected is not None and new.total not in (None, expected):
            raise Failed(f"the server announces {new.total} bytes, expected {expected}", final=True)
        total = expected if new.total is None else new.total
        room(None if total is None else total - have)
        try:
            if not have:
                discard(part)
            notes(part).write_text(json.dumps(new._asdict()), encoding="utf-8")
            with part.open("ab") as out:
                meter.begin(have, total)
                receive(response, out, timeout, meter)
        except OSError as error:
            raise full(part.parent, error, None if total is None else total - part.stat().st_size) from None
    got = part.stat().st_size
    if total is not None and got != total:
        raise Failed(f"broke off after {got} of {total} bytes")


def continues(headers: Any, known: Version, url: str, have: int) -> bool:
    """Is a partial answer the rest of the part?"""
    span = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", headers.get("Content-Range", ""))
    if not span or int(span[1]) != have or span[2] not in ("*", str(known.total)):
        return False
    # Servers without If-Range answer 206 for another version too.
    return url != known.url or validator(headers) in (None, known.validator)


def page(response: Any) -> None:
    try:
        refuse_page("", response.read(4096))
    except ValueError as error:
        raise Failed(str(error).removeprefix(": "), final=True) from None
    except (OSError, http.client.HTTPException):
        pass
    raise Failed("found a page of type text/html, expected a file", final=True)


def receive(response: Any, out: IO[bytes], timeout: float, meter: Meter) -> None:
    """Write the body as it comes.

    Raises:
        Failed: the connection broke, or nothing or next to nothing came for the time-out.
        OSError: the disk is full.
    """
    since, count = time.monotonic(), 0
    while True:
        try:
            data = response.read1(BLOCK)
        except (OSError, http.client.HTTPException) as error:
            why = reason(error, timeout)
            raise Failed("stalled: " + why if why.startswith("no answer") else f"broke off: {why}") from None
        if not data:
            return
        out.write(data)
        meter.add(len(data))
        count += len(data)
        now = time.monotonic()
        if now - since > timeout:
            if count < SLOWEST * (now - since):
                raise Failed(f"stalled: {count} bytes in {now - since:.0f} s")
            since, count = now, 0


def full(folder: Path, error: OSError, missing: int | None = None) -> ValueError:
    """What to say of a write that failed."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ValueError(f"{error.filename or folder}: {error.strerror or error}. Check the folder.")
    needed = f", expected {size(missing)} more" if missing else ""
    free = size(shutil.disk_usage(folder).free)
    return ValueError(f"{folder}: the disk is full: found {free} free{needed}. Make room, and run again.")
