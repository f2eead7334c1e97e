"""The generated texts of the grids.

For translation, the target is the source in reverse order, with each word mapped to another word. Words are drawn
uniformly, so no model without attention can beat the entropy of one word.

For classifiers, a line has a sentence, `|||`, and a sentence of the other language. Half of the pairs are near misses:
two words of the translation come from another sentence, or two neighbouring words are swapped. So no single word gives
a near miss away. No pair is in two splits.

Texts are seeded: the same call writes the same bytes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.steps.common import read_lines, write_lines
from recipes.steps.extract import extract
from recipes.text import SPLITS
from recipes.training import binarise

SHORTEST, LONGEST = 4, 12
"""Fewest and most words of a generated sentence."""
MARK = "|||"
AT_MOST = 30
"""Most words of a sentence to classify."""
Pair = tuple[str, str]


def reversed_pairs(split: str, size: int, words: int) -> list[Pair]:
    """Source and target of `size` sentences. Each split has its own seed."""
    generator = random.Random(SPLITS.index(split))
    others = list(range(words))
    random.Random(words).shuffle(others)  # all splits have the same map of words
    text = []
    for _ in range(size):
        sentence = [generator.randrange(words) for _ in range(generator.randint(SHORTEST, LONGEST))]
        text.append((" ".join(f"w{w}" for w in sentence), " ".join(f"w{others[w]}" for w in reversed(sentence))))
    return text


def near_miss(words: list[str], others: list[str], generator: random.Random) -> list[str]:
    """The words with two different neighbours swapped, or with up to two words replaced by words of `others`."""
    places = [place for place in range(len(words) - 1) if words[place] != words[place + 1]]
    if places and generator.random() < 0.5:
        at = generator.choice(places)
        return [*words[:at], words[at + 1], words[at], *words[at + 2 :]]
    changed = list(words)
    for at in generator.sample(range(len(words)), min(2, len(words))):
        changed[at] = generator.choice([word for word in others if word != words[at]] or [MARK])
    return changed


def labelled(text: Sequence[Pair], generator: random.Random) -> tuple[list[str], list[str]]:
    """Lines and their labels: `yes` and `no` alternate."""
    lines, labels = [], []
    for number, (one, other) in enumerate(text):
        words = other.split()
        if number % 2:
            words = near_miss(words, text[generator.randrange(len(text))][1].split(), generator)
        lines.append(f"{one} {MARK} {' '.join(words)}")
        labels.append("no" if number % 2 else "yes")
    return lines, labels


def read_pairs(folder: Path, pair: str) -> list[Pair]:
    """The different training pairs of a parallel text in lower case, without empty and long sentences.

    Raises:
        ValueError: the two files differ in their number of lines.
    """
    one, other = (read_lines(folder / f"train.{language}") for language in pair.split("-"))
    if len(one) != len(other):
        raise ValueError(f"{folder}: expected train.* of the two languages {pair} with as many lines. Give PAIR=.")
    # Join the words by spaces: fairseq takes a carriage return for a new line, which would shift the labels.
    text = [(" ".join(left.lower().split()), " ".join(right.lower().split())) for left, right in zip(one, other)]
    return list(dict.fromkeys(pair for pair in text if all(0 < len(side.split()) <= AT_MOST for side in pair)))


def generated_pairs(size: int, words: int) -> list[Pair]:
    """Different pairs of the corpus of `make compare`.

    This draws `size` pairs. If some are equal, it draws twice as many and drops the duplicates.
    """
    text = dict.fromkeys(reversed_pairs("train", size, words))
    return list(text if len(text) == size else dict.fromkeys(reversed_pairs("train", 2 * size, words)))


def write_classified(folder: Path, text: list[Pair], pretrain: int, examples: int, held_out: int) -> None:
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
    for split, size in zip(SPLITS, (examples, held_out, held_out)):
        lines, labels = labelled(text[:size], generator)
        text = text[size:]
        write_lines(folder / f"pairs.{split}", lines)
        write_lines(folder / f"label.{split}", labels)
    lines = [f"{one} {MARK} {other}" for one, other in text[:pretrain]]
    write_lines(folder / "pretrain.valid", lines[: len(lines) // 20 + 1])
    write_lines(folder / "pretrain.train", lines[len(lines) // 20 + 1 :])


def reversed_text(folder: Path, sizes: Sequence[int], words: int) -> Path:
    """The folder of the generated text (train.a, train.b and so on), which is written if it does not exist."""
    text = folder / "-".join(map(str, ["reversed", *sizes, words]))
    for split, size in zip(SPLITS, sizes):
        if not (text / f"{split}.b").exists():
            for language, lines in zip("ab", zip(*reversed_pairs(split, size, words))):
                write_lines(text / f"{split}.{language}", lines)
    return text


def write_pairs(settings: Any, folder: Path) -> None:
    """Write the text of make deeper: pairs for pre-training, and labelled pairs; both as text and binary data."""
    s, text, data = settings, folder / "text", folder / "bin"
    if s.DATA:
        for language in s.PAIR.split("-"):
            extract(Path(s.DATA), [f"train.{language}"], text / f"raw/train.{language}")
        sentences = read_pairs(text / "raw", s.PAIR)
    else:
        sentences = generated_pairs(s.PRETRAIN + s.EXAMPLES + 2 * s.HELD_OUT, s.WORDS)
    write_classified(text, sentences, s.PRETRAIN, s.EXAMPLES, s.HELD_OUT)

    def write(out: Path, prefix: str, *options: object, splits: Sequence[str] = SPLITS) -> None:
        prefixes = (word for split in splits for word in (f"--{split}pref", text / f"{prefix}.{split}"))
        binarise(out, "--only-source", *options, *prefixes)

    write(data, "pretrain", "--nwordssrc", 8000, splits=("train", "valid"))
    write(data / "input0", "pairs", "--srcdict", data / "dict.txt")
    write(data / "label", "label")
