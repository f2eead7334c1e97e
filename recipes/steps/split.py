"""Join parallel texts into one; or keep every Nth pair of it to validate on, or the rest to train on.

    python -m recipes.steps.split raw/europarl raw/news --languages de en --out raw/valid --every 100 --keep nth

reads raw/europarl.de, raw/europarl.en, raw/news.de and raw/news.en; writes raw/valid.de and raw/valid.en.
"""

from __future__ import annotations

import argparse
import logging
from itertools import chain

from recipes.steps import bar
from recipes.steps.common import run, writing
from recipes.steps.streaming import blocks

logger = logging.getLogger(__name__)


def numbers(first: int, count: int, every: int | None, nth: bool) -> list[int]:
    """Which of the pairs numbered first, first + 1, ... are kept, counted from 0.

    Args:
        first: number of the first pair in the whole text, from 1.
        count: how many there are.
        every: N; None keeps all.
        nth: keep those whose number N divides, otherwise the others.
    """
    if every is None:
        return list(range(count))
    return [index for index in range(count) if ((first + index) % every == 0) == nth]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="+", metavar="PREFIX", help="prefixes of parallel texts, in order")
    parser.add_argument("--languages", nargs=2, required=True, metavar="LANGUAGE", help="their endings, as in de en")
    parser.add_argument("-o", "--out", required=True, metavar="PREFIX", help="prefix to write to")
    parser.add_argument("--every", type=int, metavar="N", help="split the pairs by whether N divides their number")
    parser.add_argument("--keep", choices=["rest", "nth"], help="keep the pairs N divides (nth), or the rest")
    args = parser.parse_args()
    if (args.every is None) != (args.keep is None):
        raise ValueError("--every N goes with --keep nth or --keep rest; expected both or neither.")
    if args.every is not None and args.every < 2:
        raise ValueError(f"--every {args.every}; expected 2 or more.")

    before = kept = 0
    parts = [[f"{part}.{language}" for language in args.languages] for part in args.parts]
    with writing(*(f"{args.out}.{language}" for language in args.languages)) as files:
        with bar.texts(f"split {args.out}", *chain(*parts)) as shown:
            for block in chain.from_iterable(blocks(*paths, shown=shown) for paths in parts):
                chosen = numbers(before + 1, len(block.lines[0]), args.every, args.keep == "nth")
                for file, lines in zip(files, block.lines):
                    # The last line of a file may lack its newline.
                    file.writelines(lines[index].rstrip(b"\n") + b"\n" for index in chosen)
                before += len(block.lines[0])
                kept += len(chosen)
        if not kept:
            raise ValueError(
                f"{' '.join(args.parts)}: none of {before} pairs is kept; expected some. Check prefixes and --every."
            )
        logger.info("%s: %d of %d pairs", args.out, kept, before)


if __name__ == "__main__":
    run(main)
