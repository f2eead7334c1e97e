"""Check a prepared text against what is published of it: numbers of pairs, and git's blob ids of files.

    python -m recipes.steps.counts runs/iwslt14/data de en split/train=160239 bpe/train.de=f0a0c7d5...

Another number of pairs is refused. Whether the files with a blob id are those, is said.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
from pathlib import Path

from recipes.steps.common import run

log = logging.getLogger(__name__)
ID = 40
"""Digits of a blob id."""


def count(path: Path) -> int:
    """Lines of a file, read a piece at a time."""
    with path.open("rb") as file:
        return sum(piece.count(b"\n") for piece in iter(lambda: file.read(2**20), b""))


def blob(path: Path) -> str:
    """What `git hash-object` prints: the SHA-1 of "blob SIZE", a zero byte and the content."""
    state = hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        for piece in iter(lambda: file.read(2**20), b""):
            state.update(piece)
    return state.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("expected", nargs="+", metavar="SPLIT=PAIRS|FILE=ID")
    args = parser.parse_args()
    expected = dict(item.split("=") for item in args.expected)
    blobs = {name: value for name, value in expected.items() if len(value) == ID}
    for split in expected.keys() - blobs.keys():
        for language in (args.source, args.target):
            path = args.folder / f"{split}.{language}"
            if (found := count(path)) != int(expected[split]):
                raise ValueError(
                    f"{path} has {found} lines, expected {expected[split]}, as in the published text. Check where the "
                    "archive came from, or give EXPECT= to train on this text anyway."
                )
    others = [name for name, value in blobs.items() if blob(args.folder / name) != value]
    if others:
        log.info("%s: not the published text, by git's blob ids: %s.", args.folder, ", ".join(others))
    elif blobs:
        log.info("%s: the published text, byte for byte: %s.", args.folder, ", ".join(blobs))


if __name__ == "__main__":
    run(main)
