"""Joint byte-pair encoding: subword-nmt learns it, fastBPE applies it.

    python -m recipes.steps.bpe learn 2000 tok/train.de tok/train.en -o codes
    python -m recipes.steps.bpe apply codes tok/test.de tok/test.en -o bpe

Two programs, because fastBPE's Python binding is quick but cannot learn.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterable
from pathlib import Path

from subword_nmt.learn_bpe import learn_bpe

from recipes.steps.common import read_lines, run, write_lines
from recipes.steps.text import BPE


def learn(lines: Iterable[str], merges: int) -> list[str]:
    """The merges, most frequent first, as fastBPE reads them.

    subword-nmt writes a "#version" line and two columns; fastBPE wants no such line and a third column, a count that
    it only checks the presence of.
    """
    codes = io.StringIO()
    learn_bpe(lines, codes, merges)
    return [f"{merge} 1" for merge in codes.getvalue().splitlines() if not merge.startswith("#version")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    learning = commands.add_parser("learn")
    learning.add_argument("merges", type=int)
    learning.add_argument("texts", nargs="+")
    applying = commands.add_parser("apply")
    applying.add_argument("codes", type=Path)
    applying.add_argument("texts", nargs="+", type=Path)
    learning.add_argument("-o", "--out", type=Path, required=True, help="the codes, a file")
    applying.add_argument("-o", "--out", type=Path, required=True, help="a folder for files of the texts' names")
    args = parser.parse_args()

    if args.command == "learn":
        write_lines(args.out, learn((line for text in args.texts for line in read_lines(text)), args.merges))
    else:
        codes = BPE(args.codes)
        for text in args.texts:
            write_lines(args.out / text.name, codes.apply(read_lines(text)))


if __name__ == "__main__":
    run(main)
