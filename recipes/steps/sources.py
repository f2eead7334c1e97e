"""The content of a text's sources, by which a text is named.

RUNS/sources.json remembers the hash of every file, with its size and time of change. So a file is read again only if it
has changed, and a source may be deleted once its text is made.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recipes.steps.common import write_lines
from recipes.steps.guard import locked
from recipes.steps.table import digest


class Sources:
    """Hashes of files by their absolute paths, kept in `register`."""

    def __init__(self, register: Path) -> None:
        self.register = register

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            return json.loads(self.register.read_text(encoding="utf-8")) if self.register.exists() else {}
        except ValueError:  # a loss of power: only the hashes of sources that are gone are lost
            return {}

    def known(self, path: Path) -> bool:
        """Whether the content of a file was read before; the file may be gone."""
        return str(path.absolute()) in self._read()

    def content(self, path: Path) -> str | None:
        """The SHA-256 of a file, or of what it contained when it was there last; None if it never was."""
        name, before = str(path.absolute()), self._read()
        if not path.is_file():
            return before[name]["sha256"] if name in before else None
        status = path.stat()
        # The time of modification would not do: programs that copy a file may set it.
        now: dict[str, Any] = {"bytes": status.st_size, "changed": status.st_ctime_ns}
        if name in before and before[name].items() >= now.items():
            return before[name]["sha256"]
        now["sha256"] = digest(path, "sha256")
        with locked(self.register.with_name(f".{self.register.name}.guard")):
            write_lines(self.register, [json.dumps(self._read() | {name: now}, indent=1)])
        return now["sha256"]
