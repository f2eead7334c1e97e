"""Tokenise one split of a parallel text, as text.json says.

    D=runs/demo/data; python -m recipes.steps.tokenise $D/text.json $D/raw/train $D/tok/train --drop-empty

reads raw/train.de and raw/train.en, writes tok/train.de and tok/train.en, line for line.
"""

import argparse
import logging
from pathlib import Path

from recipes.steps.common import read_lines, run, write_lines
from recipes.steps.text import Text

logger = logging.getLogger(__name__)


def drop_empty(sides: list[list[str]]) -> list[list[str]]:
    """Leave out the pairs of which a side is empty: a model learns nothing from them."""
    pairs = [pair for pair in zip(*sides) if all(pair)]
    if not pairs:
        raise ValueError("no pair has text on both sides; expected sentences. Check that both files hold text.")
    return [list(side) for side in zip(*pairs)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text", type=Path, help="text.json")
    parser.add_argument("raw", help="prefix of the raw text: RAW.de, RAW.en")
    parser.add_argument("out", help="prefix to write to")
    parser.add_argument("--drop-empty", action="store_true", help="drop pairs with an empty side (training text only)")
    args = parser.parse_args()

    text = Text.read(args.text)
    languages = (text.source, text.target)
    paths = [f"{args.raw}.{language}" for language in languages]
    sides = [read_lines(path) for path in paths]
    if len(sides[0]) != len(sides[1]):
        raise ValueError(
            f"{paths[0]} has {len(sides[0])} lines, {paths[1]} has {len(sides[1])}; expected as many, each line the "
            "other's translation. Fetch or align the files again."
        )
    sides = [[text.tokenise(line, language) for line in side] for side, language in zip(sides, languages)]
    if args.drop_empty:
        before = len(sides[0])
        sides = drop_empty(sides)
        after = len(sides[0])
        logger.info("%s: dropped %d pairs with an empty side, kept %d", args.raw, before - after, after)
    for side, language in zip(sides, languages):
        write_lines(f"{args.out}.{language}", side)


if __name__ == "__main__":
    run(main)
