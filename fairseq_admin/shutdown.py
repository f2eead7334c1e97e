"""End fairseq's thread that loads batches ahead, before Python exits.

If training stops within an epoch, the thread is still loading. At exit, Python kills daemon threads wherever they are.
If the thread is in the middle of torch's C++ code, the process aborts, with status -6 after a good training.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from contextlib import suppress

from fairseq.data.iterators import BackgroundConsumer

PATIENCE = 5.0
"""Seconds to wait for the batch that a thread is loading."""


@atexit.register
def end() -> None:
    """End all such threads after their current batch. Give up after PATIENCE."""
    until = time.monotonic() + PATIENCE
    for thread in threading.enumerate():
        if isinstance(thread, BackgroundConsumer):
            thread._max_len = 0  # tells the thread that it has loaded enough, which is how fairseq ends it
            while thread.is_alive() and time.monotonic() < until:
                with suppress(queue.Empty):
                    thread._queue.get_nowait()  # make room for its next batch
                thread.join(0.01)
