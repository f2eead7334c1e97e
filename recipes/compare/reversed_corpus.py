"""Write one split of a corpus whose target is the source reversed, and each word re-mapped to another.

    python -m recipes.compare.reversed_corpus train runs/compare/text/train --pairs 20000 --words 100

writes train.a and train.b. Words are drawn uniformly, so without attention nothing beats the entropy of one word.
Seeded: the same call writes the same bytes; splits have seeds of their own.
"""

from __future__ import annotations

import argparse
import random

from recipes.steps.common import run, write_lines

SPLITS = ("train", "valid", "test")
SHORTEST, LONGEST = 4, 12


def pairs(split: str, size: int, words: int) -> list[tuple[str, str]]:
    """Source and target of `size` sentences."""
    generator = random.Random(SPLITS.index(split))
    others = list(range(words))
    random.Random(words).shuffle(others)  # the same map for every split
    found = []
    for _ in range(size):
        sentence = [generator.randrange(words) for _ in range(generator.randint(SHORTEST, LONGEST))]
        found.append((" ".join(f"w{w}" for w in sentence), " ".join(f"w{others[w]}" for w in reversed(sentence))))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("split", choices=SPLITS)
    parser.add_argument("prefix", help="where to write: PREFIX.a and PREFIX.b")
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--words", type=int, required=True)
    args = parser.parse_args()
    if args.pairs < 1 or args.words < 2:
        raise ValueError(f"--pairs {args.pairs} --words {args.words}: expected at least 1 pair and 2 words.")
    text = pairs(args.split, args.pairs, args.words)
    for side, language in enumerate("ab"):
        write_lines(f"{args.prefix}.{language}", (pair[side] for pair in text))


if __name__ == "__main__":
    run(main)
