"""fairseq's thread that makes batches ahead, ended before Python ends.

Where training stops within an epoch, the thread is still at work. It is a daemon, which Python ends wherever it is; in
the middle of torch's C++ that aborts the process, with status -6 after a training that went well.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from contextlib import suppress

from fairseq.data.iterators import BackgroundConsumer

PATIENCE = 5.0
"""Seconds to wait for the batch that a thread is at."""


@atexit.register
def end() -> None:
    """End all that are at work, with the batch that they are at; one that takes longer than PATIENCE stays."""
    until = time.monotonic() + PATIENCE
    for thread in threading.enumerate():
        if isinstance(thread, BackgroundConsumer):
            thread._max_len = 0  # fairseq's own way to end it: it has made enough
            while thread.is_alive() and time.monotonic() < until:
                with suppress(queue.Empty):
                    thread._queue.get_nowait()  # room for what it is about to put there
                thread.join(0.01)
