"""What the plugin says of itself, read from its files: importing it, with torch and fairseq, takes seconds.

    python -m recipes.steps.plugin

prints for make, a word each, every scheme of the table and every one that folds, has ω, or takes any feed-forward
weights, as SCHEME=admin FOLDS=admin OMEGA=admin FFN=admin. Only the standard library is used: a plan can be printed
before anything is installed.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

PLUGIN = Path(__file__).parents[2] / "fairseq_admin"


def module(path: str) -> Any:
    """A file of the plugin that imports none of its others, as a module by itself."""
    name = f"fairseq_admin_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, PLUGIN / path)
    assert spec is not None and spec.loader is not None
    found = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(found)
    return found


_TABLES = module("method/schemes.py")

SCHEMES: dict[str, Any] = _TABLES.SCHEMES
"""The table of schemes, its rows by name."""

EVERY: dict[str, Any] = _TABLES.EVERY
"""The same with the rows for new layers on a pre-trained encoder alone."""

DIVERGED: int = module("errors.py").DIVERGED
"""The exit status of a training that has diverged."""

LOGS = module("logs.py")
"""The reader of fairseq's log."""


def main() -> None:
    for name, row in SCHEMES.items():
        words = {"SCHEME": True, "FOLDS": row.folds, "OMEGA": row.omega, "FFN": row.ffn is not None}
        print(*(f"{word}={name}" for word, holds in words.items() if holds))
    print(*(f"MORE={name}" for name in EVERY if not name.startswith("t-fixup")))


if __name__ == "__main__":
    main()
