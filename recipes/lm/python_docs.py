"""English prose that comes with Python: its reference (pydoc's topics) and the docstrings of its standard library.

Each line is a paragraph, with spaces between words and punctuation. A hash of the name assigns a whole module or topic
to one split. The same Python gives the same corpus. Files are parsed, not imported.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from recipes.steps.common import write_lines

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip"}
"""Folders without documentation, or with documentation of other packages."""

SPLITS = ("valid", "test", "train")
"""In the order in which they are written."""

SHARES = 20
"""One module in this many is in the validation set, and one in the test set."""

PIECE = re.compile(r"\w+|[^\w\s]")
# Prose begins with a letter, ends as a sentence does, and is mostly words.
PROSE = re.compile(r"[^\W\d_].*[.:!?]$", re.DOTALL)
WORDS = 6
LONGEST = 400
"""Fewest words of a paragraph, and most words and punctuation marks. Longer blocks are tables or grammars."""


def split_of(name: str) -> str:
    """The split of a module or topic."""
    share = int(hashlib.sha256(name.encode()).hexdigest(), 16) % SHARES
    return "valid" if share == 0 else "test" if share == 1 else "train"


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of prose in a documentation text, with spaces between words and punctuation."""
    for block in re.split(r"\n\s*\n", text):
        if not PROSE.match(block.strip()) or any(mark in block for mark in (">>>", "====", "----", "::=")):
            continue
        pieces = PIECE.findall(block)
        if sum(piece[0].isalpha() for piece in pieces) >= max(WORDS, len(pieces) * 0.6) and len(pieces) <= LONGEST:
            yield " ".join(pieces)


def modules(library: Path) -> Iterator[tuple[str, bytes]]:
    """Name and source of the modules of a standard library that the corpus is made from."""
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library).as_posix()
        if not LEFT_OUT & set(name.split("/")):
            yield name, path.read_bytes()


def digest(library: Path) -> str:
    """The SHA-256 of the library's modules."""
    state = hashlib.sha256()
    for name, source in modules(library):
        state.update(f"{name} {len(source)}\n".encode() + source)
    return state.hexdigest()


def documentation(tree: ast.Module, name: str) -> Iterator[tuple[str, str]]:
    """Names and texts of documentation in a module: pydoc's topics if it is their module, otherwise docstrings."""
    for node in ast.walk(tree):
        if name != "pydoc_data/topics.py":
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield name, ast.get_docstring(node) or ""
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            yield from sorted((f"topic {topic}", text) for topic, text in ast.literal_eval(node.value).items())


def corpus(library: Path) -> dict[str, list[str]]:
    """The lines of every split. A paragraph that occurs twice is included once.

    Raises:
        ValueError: a split is empty, for instance because the sources of the library are missing.
    """
    lines: dict[str, list[str]] = {split: [] for split in SPLITS}
    seen: set[str] = set()
    for module, source in modules(library):
        for name, text in documentation(ast.parse(source.decode()), module):
            for paragraph in paragraphs(text):
                if paragraph not in seen:
                    seen.add(paragraph)
                    lines[split_of(name)].append(paragraph)
    for split in SPLITS:
        if not lines[split]:
            raise ValueError(
                f"{library}: found no documentation for {split}; expected the sources of Python's standard library. "
                "Run with a Python that has them (PYTHON=)."
            )
    return lines


def write(folder: Path, library: Path) -> None:
    """Write the files valid, test and train."""
    for split, lines in corpus(library).items():
        write_lines(folder / split, lines)
