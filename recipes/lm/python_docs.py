"""English prose that comes with Python: its own reference (pydoc's topics) and its standard library's docstrings.

A paragraph is a line, words and punctuation apart. A hash of its name puts a whole module or topic into one split, so
no text is divided between splits. The same Python gives the same corpus. Files are parsed, not imported.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipes.steps.common import write_lines

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip"}
"""Folders without documentation, or with somebody else's."""

SPLITS = ("valid", "test", "train")
"""In the order in which they are written."""

SHARES = 20
"""One module in this many validates, and one tests."""

PIECE = re.compile(r"\w+|[^\w\s]")
# Prose: begins with a letter, ends as a sentence does, and is mostly words.
PROSE = re.compile(r"[^\W\d_].*[.:!?]$", re.DOTALL)
WORDS = 6
LONGEST = 400
"""Fewest words of a paragraph, and most words and punctuation marks; what is longer is a table or a grammar."""


def split_of(name: str) -> str:
    """The split of a module or topic."""
    share = int(hashlib.sha256(name.encode()).hexdigest(), 16) % SHARES
    return "valid" if share == 0 else "test" if share == 1 else "train"


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of prose in a documentation text, their words and punctuation apart."""
    for block in re.split(r"\n\s*\n", text):
        if not PROSE.match(block.strip()) or any(mark in block for mark in (">>>", "====", "----", "::=")):
            continue
        pieces = PIECE.findall(block)
        if sum(piece[0].isalpha() for piece in pieces) >= max(WORDS, len(pieces) * 0.6) and len(pieces) <= LONGEST:
            yield " ".join(pieces)


def modules(library: Path) -> Iterator[tuple[str, bytes]]:
    """The sources of a standard library that the corpus is read from, with their names."""
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library).as_posix()
        if not LEFT_OUT & set(name.split("/")):
            yield name, path.read_bytes()


def describe(library: Path) -> dict[str, Any]:
    """The library as `steps.records.describe` has a file: where it is, and what tells its content."""
    state, size = hashlib.sha256(), 0
    for name, source in modules(library):
        state.update(f"{name} {len(source)}\n".encode() + source)
        size += len(source)
    return {"path": str(library.absolute()), "bytes": size, "sha256": state.hexdigest()}


def documentation(tree: ast.Module, name: str) -> Iterator[tuple[str, str]]:
    """The texts that pydoc shows, each with a name of its own, where it is their module; otherwise docstrings."""
    for node in ast.walk(tree):
        if name != "pydoc_data/topics.py":
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield name, ast.get_docstring(node) or ""
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            yield from sorted((f"topic {topic}", text) for topic, text in ast.literal_eval(node.value).items())


def corpus(library: Path) -> dict[str, list[str]]:
    """The lines of every split; a paragraph that occurs twice counts once.

    Raises:
        ValueError: a split is empty: the library's sources are not there.
    """
    lines: dict[str, list[str]] = {split: [] for split in SPLITS}
    seen: set[str] = set()
    for module, source in modules(library):
        for name, text in documentation(ast.parse(source.decode()), module):
            for paragraph in paragraphs(text):
                if paragraph not in seen:
                    seen.add(paragraph)
                    lines[split_of(name)].append(paragraph)
    for split, found in lines.items():
        if not found:
            raise ValueError(
                f"{library}: found no documentation for {split}; expected the sources of Python's standard library. "
                "Run with a Python that has them (PYTHON=)."
            )
    return lines


def write(folder: Path, library: Path) -> None:
    """Write valid, test and train."""
    for split, lines in corpus(library).items():
        write_lines(folder / split, lines)
