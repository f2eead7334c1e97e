"""The memory of a process, in MiB; nan where it has no /proc to tell.

(Peaks of getrusage are not to be trusted on Linux, where a child begins with its parent's across exec.)
"""

from __future__ import annotations

import re
from pathlib import Path

# Given back at once: what malloc keeps for later is no one's memory.
BLOCKS_OF_THEIR_OWN = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}
"""The environment of a process whose memory is measured."""


def _status(name: str) -> float:
    status = Path("/proc/self/status")
    found = re.search(rf"{name}:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) / 2**10 if found else float("nan")


def peak() -> float:
    """At most, so far."""
    return _status("VmHWM")


def resident() -> float:
    """Now."""
    return _status("VmRSS")
