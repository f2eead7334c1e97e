"""How far tokenizers is while it learns merges, which it tells on standard error alone, as JSON lines."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO

from recipes.steps import bar

MERGES = "Compute merges"
"""What tokenizers calls its last stage."""


OPTIONS: dict[str, Any] = {"show_progress": True, "progress_format": "json"}
"""What has a trainer tell."""


@contextlib.contextmanager
def shown(merges: int) -> Iterator[None]:
    """Show what is told in this block as bars, one a stage; whatever else is written to standard error goes through.

    Args:
        merges: how many there may be; tokenizers counts its characters to them.
    """
    sys.stderr.flush()
    kept, (reading, writing) = os.dup(2), os.pipe()
    os.dup2(writing, 2)
    os.close(writing)
    with open(kept, "w", encoding="utf-8", buffering=1) as terminal, contextlib.redirect_stderr(terminal):
        reader = threading.Thread(target=_show, args=(reading, terminal, merges))
        reader.start()
        try:
            yield
        finally:
            os.dup2(kept, 2)  # closes the pipe's last end for writing, which ends the thread
            reader.join()


def _show(reading: int, terminal: TextIO, merges: int) -> None:
    stage, current = "", contextlib.ExitStack()
    with open(reading, encoding="utf-8", errors="replace") as lines, current:
        for line in lines:
            told = _told(line)
            if told is None:
                terminal.write(line)
                continue
            if told["stage"] != stage:
                stage = told["stage"]
                current.close()
                total = merges if stage == MERGES else told["total"]
                progress = current.enter_context(bar.bar(stage.lower(), total, unit=""))
            progress.update(told["current"] - progress.n)


def _told(line: str) -> dict[str, Any] | None:
    """A line that tells of a stage, or None."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and found.keys() >= {"stage", "current", "total"} else None
