"""Two texts from sentences in two languages: one to pre-train on, and pairs to classify as translations or near misses.

    python -m recipes.deeper.pairs OUT --pretrain 20000 --examples 4000 --words 100
    python -m recipes.deeper.pairs OUT --pretrain 20000 --examples 4000 --text DATA --pair de-en

writes OUT/pretrain.train and .valid, and OUT/pairs.train, .valid, .test with OUT/label.* next to them. A line is a
sentence, `|||` and the other one. Half of the pairs are near misses: two words of the translation are those of another
sentence, or two neighbouring ones have changed places, so that no single word gives one away. Without --text the corpus
of `make compare` is generated. No pair is in two texts. Seeded: the same call writes the same bytes.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from recipes.compare.reversed_corpus import pairs as generated
from recipes.steps.common import read_lines, run, write_lines

MARK = "|||"


def near_miss(words: list[str], others: list[str], generator: random.Random) -> list[str]:
    """The words with two different neighbours swapped, or two of them (of a single word that) taken from `others`."""
    places = [place for place in range(len(words) - 1) if words[place] != words[place + 1]]
    if places and generator.random() < 0.5:
        at = generator.choice(places)
        return [*words[:at], words[at + 1], words[at], *words[at + 2 :]]
    found = list(words)
    for at in generator.sample(range(len(words)), min(2, len(words))):
        found[at] = generator.choice([word for word in others if word != words[at]] or [MARK])
    return found


def classified(text: list[tuple[str, str]], generator: random.Random) -> tuple[list[str], list[str]]:
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


def read(folder: Path, pair: str, longest: int) -> list[tuple[str, str]]:
    """The training pairs of a parallel text, in lower case; without empty and long ones."""
    sides = [read_lines(folder / f"train.{language}") for language in pair.split("-")]
    if len(sides) != 2 or len(sides[0]) != len(sides[1]):
        raise ValueError(f"{folder}: expected train.* of the two languages {pair} with as many lines. Give PAIR=.")
    # Words alone: a carriage return, which fairseq takes for a new line, would set sentences off from their labels.
    found = [(" ".join(one.lower().split()), " ".join(other.lower().split())) for one, other in zip(*sides)]
    return [pair for pair in found if all(0 < len(side.split()) <= longest for side in pair)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--pretrain", type=int, required=True, help="pairs to pre-train on")
    parser.add_argument("--examples", type=int, required=True, help="pairs to train the classifiers on")
    parser.add_argument("--held-out", type=int, default=1000, help="pairs to validate on, and as many to test on")
    parser.add_argument("--words", type=int, default=100, help="words of a generated language")
    parser.add_argument("--text", type=Path, help="a folder with train.* in two languages")
    parser.add_argument("--pair", default="de-en")
    parser.add_argument("--longest", type=int, default=30, help="words of a sentence at most")
    args = parser.parse_args()
    if min(args.pretrain, args.examples, args.held_out) < 1:
        raise ValueError(
            f"{args.pretrain} pairs to pre-train on, {args.examples} examples and {args.held_out} held out; expected 1 "
            "or more of each. Give PRETRAIN=, EXAMPLES= and HELD_OUT= that are."
        )
    need = args.pretrain + args.examples + 2 * args.held_out
    text = read(args.text, args.pair, args.longest) if args.text else generated("train", need, args.words)
    text = list(dict.fromkeys(text))
    if len(text) < need and not args.text:
        text = list(dict.fromkeys(generated("train", 2 * need, args.words)))
    if len(text) < need:
        raise ValueError(
            f"{args.text or f'a language of {args.words} words'}: {len(text)} different pairs, {need} are needed. Give "
            "PRETRAIN= or EXAMPLES= that fit."
        )
    generator = random.Random(1)
    generator.shuffle(text)
    sizes = {"train": args.examples, "valid": args.held_out, "test": args.held_out}
    for split, size in sizes.items():
        chosen, text = text[:size], text[size:]
        lines, labels = classified(chosen, generator)
        write_lines(args.out / f"pairs.{split}", lines)
        write_lines(args.out / f"label.{split}", labels)
    lines = [f"{one} {MARK} {other}" for one, other in text[: args.pretrain]]
    write_lines(args.out / "pretrain.valid", lines[: len(lines) // 20 + 1])
    write_lines(args.out / "pretrain.train", lines[len(lines) // 20 + 1 :])


if __name__ == "__main__":
    run(main)
