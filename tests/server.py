"""An HTTP server on this machine that serves a folder, with every fault a download can meet.

with Server(folder) as server:
    server.faults = [Fault(cut=1000), Fault(status=503)]   # of the next requests, in order; then none
    ... server.url ...
    server.requests                                        # what was asked and how many bytes were sent
"""

from __future__ import annotations

import contextlib
import http.server
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


class Fault(NamedTuple):
    """What goes wrong with one request."""

    status: int = 0
    """Answer this status."""
    cut: int = -1
    """Close the connection after this many bytes of the body."""
    stall: int = -1
    """Send nothing more after this many bytes of the body, and keep the connection."""
    drip: int = -1
    """After this many bytes of the body, send one every 0.05 s."""
    hang: bool = False
    """Accept, and never answer."""
    page: bytes = b""
    """Answer this HTML page, with status 200."""
    typed: str = "text/html; charset=utf-8"
    """The page's Content-Type."""
    redirect: str = ""
    """Send the client there."""


@dataclass
class Request:
    path: str
    range: str | None
    sent: int = 0
    """Bytes of the body so far."""


class Server:
    """Serves `folder`, as a good server does unless told otherwise.

    Attributes:
        ranges: heeds Range.
        length: says how long a body is; otherwise the body ends with the connection.
        encoding: the Content-Encoding it names; the body stays as it is.
        block: bytes per write; between two, the client can be killed.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.ranges = self.length = True
        self.encoding = ""
        self.block = 1 << 16
        self.pause = 0.0
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.over = threading.Event()

    def __enter__(self) -> Server:
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *args: Any) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.http.block_on_close = False
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.http.shutdown()
        self.http.server_close()

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        fault = self.faults.pop(0) if self.faults else Fault()
        record = Request(handler.path, handler.headers.get("Range"))
        self.requests.append(record)
        handler.close_connection = True
        if fault.hang:
            self.over.wait()
            return
        with contextlib.suppress(OSError):  # The client may have gone.
            self.send(handler, fault, record)

    def send(self, handler: Any, fault: Fault, record: Request) -> None:
        """Answer as told."""
        path = self.folder / handler.path.lstrip("/")
        if fault.redirect:
            handler.send_response(302)
            handler.send_header("Location", fault.redirect)
            handler.end_headers()
            return
        if fault.status or not (path.is_file() or fault.page):
            handler.send_error(fault.status or 404)
            return
        data = fault.page or path.read_bytes()
        start = 0
        if record.range and self.ranges:
            start = int(record.range.removeprefix("bytes=").rstrip("-"))
            if start >= len(data):
                handler.send_error(416)
                return
        handler.send_response(206 if start else 200)
        handler.send_header("Content-Type", fault.typed if fault.page else "application/x-gzip")
        if self.length:
            handler.send_header("Content-Length", str(len(data) - start))
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        if self.encoding:
            handler.send_header("Content-Encoding", self.encoding)
        handler.end_headers()
        self.body(handler, fault, data[start:], record)

    def body(self, handler: Any, fault: Fault, data: bytes, record: Request) -> None:
        stop = next((n for n in (fault.cut, fault.stall, fault.drip) if n >= 0), len(data))
        while record.sent < min(stop, len(data)):
            record.sent += handler.wfile.write(data[record.sent : min(record.sent + self.block, stop)])
            if self.pause:
                self.over.wait(self.pause)
        if fault.stall >= 0:
            self.over.wait()
        while fault.drip >= 0 and record.sent < len(data) and not self.over.wait(0.05):
            record.sent += handler.wfile.write(data[record.sent : record.sent + 1])
