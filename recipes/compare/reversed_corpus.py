"""A corpus whose target is the source reversed, and each word re-mapped to another.

Words are drawn uniformly, so without attention nothing beats the entropy of one word. Seeded: the same call gives the
same text; splits have seeds of their own.
"""

from __future__ import annotations

import random
from pathlib import Path

from recipes.steps.common import write_lines

SPLITS = ("train", "valid", "test")
SHORTEST, LONGEST = 4, 12


def pairs(split: str, size: int, words: int) -> list[tuple[str, str]]:
    """Source and target of `size` sentences."""
    generator = random.Random(SPLITS.index(split))
    others = list(range(words))
    random.Random(words).shuffle(others)  # the same map for every split
    text = []
    for _ in range(size):
        sentence = [generator.randrange(words) for _ in range(generator.randint(SHORTEST, LONGEST))]
        text.append((" ".join(f"w{w}" for w in sentence), " ".join(f"w{others[w]}" for w in reversed(sentence))))
    return text


def write(folder: Path, split: str, size: int, words: int) -> None:
    """Write SPLIT.a and SPLIT.b."""
    for language, lines in zip("ab", zip(*pairs(split, size, words))):
        write_lines(folder / f"{split}.{language}", lines)
