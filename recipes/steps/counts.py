"""Check the numbers of pairs in a parallel text against the known ones.

python -m recipes.steps.counts runs/iwslt14/data/split de en train=160239 valid=7283 test=6750
"""

from __future__ import annotations

import argparse
from pathlib import Path

from recipes.steps.common import run


def count(path: Path) -> int:
    """Lines of a file, read a piece at a time."""
    with path.open("rb") as file:
        return sum(piece.count(b"\n") for piece in iter(lambda: file.read(2**20), b""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("expected", nargs="+", metavar="SPLIT=PAIRS")
    args = parser.parse_args()
    for item in args.expected:
        split, _, expected = item.partition("=")
        for language in (args.source, args.target):
            path = args.folder / f"{split}.{language}"
            found = count(path)
            if found != int(expected):
                raise ValueError(
                    f"{path} has {found} lines, expected {expected}, as in the published text. Check where the archive "
                    "came from, or give EXPECT= to train on this text anyway."
                )


if __name__ == "__main__":
    run(main)
