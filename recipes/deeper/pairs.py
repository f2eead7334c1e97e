"""Two texts from sentences in two languages: one to pre-train on, and pairs to classify as translations or near misses.

A line is a sentence, `|||` and the other one. Half of the pairs are near misses: two words of the translation are those
of another sentence, or two neighbouring ones have changed places, so that no single word gives one away. No pair is in
two texts. Seeded: the same call writes the same bytes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from recipes.compare import reversed_corpus
from recipes.steps.common import read_lines, write_lines

MARK = "|||"
LONGEST = 30
"""Words of a sentence, at most."""
Pair = tuple[str, str]


def near_miss(words: list[str], others: list[str], generator: random.Random) -> list[str]:
    """The words with two different neighbours swapped, or two of them (of a single word that) taken from `others`."""
    places = [place for place in range(len(words) - 1) if words[place] != words[place + 1]]
    if places and generator.random() < 0.5:
        at = generator.choice(places)
        return [*words[:at], words[at + 1], words[at], *words[at + 2 :]]
    changed = list(words)
    for at in generator.sample(range(len(words)), min(2, len(words))):
        changed[at] = generator.choice([word for word in others if word != words[at]] or [MARK])
    return changed


def classified(text: Sequence[Pair], generator: random.Random) -> tuple[list[str], list[str]]:
    """Lines and their labels, `yes` and `no` in turn."""
    lines, labels = [], []
    for number, (one, other) in enumerate(text):
        right = number % 2 == 0
        words = other.split()
        if not right:
            words = near_miss(words, text[generator.randrange(len(text))][1].split(), generator)
        lines.append(f"{one} {MARK} {' '.join(words)}")
        labels.append("yes" if right else "no")
    return lines, labels


def read(folder: Path, pair: str) -> list[Pair]:
    """The training pairs of a parallel text, in lower case; without empty and long ones.

    Raises:
        ValueError: it is not one.
    """
    sides = [read_lines(folder / f"train.{language}") for language in pair.split("-")]
    if len(sides) != 2 or len(sides[0]) != len(sides[1]):
        raise ValueError(f"{folder}: expected train.* of the two languages {pair} with as many lines. Give PAIR=.")
    # Words alone: a carriage return, which fairseq takes for a new line, would set sentences off from their labels.
    text = [(" ".join(one.lower().split()), " ".join(other.lower().split())) for one, other in zip(*sides)]
    return [pair for pair in text if all(0 < len(side.split()) <= LONGEST for side in pair)]


def generated(size: int, words: int) -> list[Pair]:
    """The corpus of `make compare`, with as many different pairs as there are, up to a size."""
    text = dict.fromkeys(reversed_corpus.pairs("train", size, words))
    return list(text if len(text) == size else dict.fromkeys(reversed_corpus.pairs("train", 2 * size, words)))


def write(folder: Path, text: list[Pair], pretrain: int, examples: int, held_out: int) -> None:
    """Write pretrain.train and .valid, and pairs.train, .valid and .test with label.* next to them.

    Args:
        text: different pairs.
        pretrain: pairs to pre-train on.
        examples: pairs to train the classifiers on.
        held_out: pairs to validate on, and as many to test on.

    Raises:
        ValueError: the text is too short.
    """
    if len(text) < (need := pretrain + examples + 2 * held_out):
        raise ValueError(f"{len(text)} different pairs, {need} are needed. Give PRETRAIN= or EXAMPLES= that fit.")
    generator = random.Random(1)
    generator.shuffle(text)
    for split, size in {"train": examples, "valid": held_out, "test": held_out}.items():
        chosen, text = text[:size], text[size:]
        lines, labels = classified(chosen, generator)
        write_lines(folder / f"pairs.{split}", lines)
        write_lines(folder / f"label.{split}", labels)
    lines = [f"{one} {MARK} {other}" for one, other in text[:pretrain]]
    write_lines(folder / "pretrain.valid", lines[: len(lines) // 20 + 1])
    write_lines(folder / "pretrain.train", lines[len(lines) // 20 + 1 :])
