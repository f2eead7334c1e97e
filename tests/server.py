"""A local HTTP server that serves a folder, with the faults that a download may meet.

with Server(folder) as server:
    server.faults = [Fault(cut=1000), Fault(status=503)]   # one per request, in order; then none
    ... server.url ...
    server.asked                                           # requested paths, each with the start of its range
"""

from __future__ import annotations

import contextlib
import http.server
import threading
from email.utils import formatdate
from pathlib import Path
from typing import Any, NamedTuple

BLOCK = 1 << 13


class Fault(NamedTuple):
    """A fault of one request: an error status, or a connection that closes (cut) or hangs after that many bytes.

    A `silent` server does not answer at all.
    """

    silent: bool = False
    status: int = 0
    cut: int = -1
    hang: int = -1
    page: bytes = b""


class Server:
    """Serve `folder`, without faults by default.

    Attributes:
        ranges: honour the Range header.
        length: send Content-Length. If not, the body ends when the connection closes.
        encoding: Content-Encoding header to send. The body is not encoded.
        pause: seconds between writes of 8 KiB.
        dated: send Last-Modified.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.ranges = self.length = True
        self.encoding, self.pause, self.dated = "", 0.0, False
        self.faults: list[Fault] = []
        self.asked: list[str] = []
        self.over = threading.Event()

    def __enter__(self) -> Server:
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fault = outer.faults.pop(0) if outer.faults else Fault()
                start = int((self.headers.get("Range") or "bytes=0-")[6:-1])
                outer.asked.append(f"{self.path.split('/')[1]}{f' {start}' if start else ''}")
                self.close_connection = True
                with contextlib.suppress(OSError):  # the client may have disconnected
                    outer.send(self, fault, start if outer.ranges else 0)

            def log_message(self, *args: Any) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads, self.http.block_on_close = True, False
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.http.shutdown()
        self.http.server_close()

    def send(self, handler: Any, fault: Fault, start: int) -> None:
        if fault.silent:
            return self.over.wait()
        path = self.folder / handler.path.lstrip("/")
        if fault.status or not (path.is_file() or fault.page):
            return handler.send_error(fault.status or 404)
        data = fault.page or path.read_bytes()
        handler.send_response(206 if start else 200)
        if self.length:
            handler.send_header("Content-Length", str(len(data) - start))
        if self.dated:
            handler.send_header("Last-Modified", formatdate(path.stat().st_mtime, usegmt=True))
        if self.encoding:
            handler.send_header("Content-Encoding", self.encoding)
        handler.end_headers()
        data = data[start:]
        stop = next((n for n in (fault.cut, fault.hang) if n >= 0), len(data))
        for at in range(0, min(stop, len(data)), BLOCK):
            handler.wfile.write(data[at : min(at + BLOCK, stop)])
            self.over.wait(self.pause)
        if fault.hang >= 0:
            self.over.wait()
