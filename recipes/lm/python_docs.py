"""English prose that comes with Python: its own reference (pydoc's topics) and its standard library's docstrings.

    python -m recipes.lm.python_docs runs/lm-demo/data/tok
    python -m recipes.lm.python_docs --describe runs/lm-demo/data/library.json

writes train, valid and test, a paragraph per line, words and punctuation apart. A hash of its name puts a whole module
or topic into one split, so no text is divided between splits. The same Python gives the same corpus. Files are parsed,
not imported. With --describe, what the corpus would be read from, as a setting of the text.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipes.steps.common import run, write_lines

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


def docstrings(source: str) -> Iterator[str]:
    """Those of a module, its classes and its functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield text


def modules(library: Path) -> Iterator[tuple[str, bytes]]:
    """The sources of a standard library that the corpus is read from, with their names.

    Raises:
        ValueError: one cannot be read.
    """
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library).as_posix()
        if not LEFT_OUT & set(name.split("/")):
            try:
                yield name, path.read_bytes()
            except OSError as error:
                raise ValueError(f"{path}: {error.strerror}; a module of Python's standard library expected.") from None


def describe(library: Path) -> dict[str, Any]:
    """The library as `recipes.steps.settings` holds a file: where it is, and what tells its content."""
    state, size = hashlib.sha256(), 0
    for name, source in modules(library):
        state.update(f"{name} {len(source)}\n".encode() + source)
        size += len(source)
    return {"path": str(library.absolute()), "bytes": size, "sha256": state.hexdigest()}


def texts(library: Path) -> Iterator[tuple[str, str]]:
    """Every documentation text of a standard library, with the name of its module or topic.

    Raises:
        ValueError: a source cannot be read, or is not Python.
    """
    for name, content in modules(library):
        try:
            source = content.decode()
            if name == "pydoc_data/topics.py":
                yield from sorted(_topics(source).items())
            else:
                yield from [(name, text) for text in docstrings(source)]
        except (SyntaxError, UnicodeDecodeError) as error:
            raise ValueError(f"{library / name} is not Python in UTF-8 ({error}). Give another LIBRARY=.") from None


def _topics(source: str) -> dict[str, str]:
    """The texts that pydoc shows: a module that assigns one dict of strings."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return {f"topic {name}": text for name, text in ast.literal_eval(node.value).items()}
    return {}


def corpus(library: Path) -> dict[str, list[str]]:
    """The lines of every split; a paragraph that occurs twice counts once.

    Raises:
        ValueError: a split is empty: the library's sources are not there.
    """
    lines: dict[str, list[str]] = {split: [] for split in SPLITS}
    seen: set[str] = set()
    for name, text in texts(library):
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="a folder for train, valid and test; with --describe, a file")
    parser.add_argument("--describe", action="store_true", help="write what would be read, as a setting")
    parser.add_argument("--library", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    args = parser.parse_args()
    if args.describe:
        write_lines(args.out, [json.dumps({"library": describe(args.library)})])
        return
    for split, lines in corpus(args.library).items():
        write_lines(args.out / split, lines)


if __name__ == "__main__":
    run(main)
