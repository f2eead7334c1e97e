"""The text of a grid, as fairseq's binary data: generated, or a recipe's own."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from recipes import recipe
from recipes.compare import reversed_corpus
from recipes.deeper import pairs
from recipes.recipe import Recipe
from recipes.steps.common import write_lines
from recipes.steps.extract import extract
from recipes.text import SPLITS, binarise


def prefixes(prefix: str, *splits: str) -> list[object]:
    """fairseq-preprocess' options for a text's splits."""
    return [word for split in splits for word in (f"--{split}pref", f"{prefix}{split}")]


def generated(settings: Any, folder: Path) -> None:
    """Sentences whose translation is in the reverse order."""
    s, text, data = settings, folder / "text", folder / "bin"
    if (data / "dict.b.txt").exists():
        return
    for split, size in zip(SPLITS, (s.PAIRS, s.VALID_PAIRS, s.TEST_PAIRS)):
        reversed_corpus.write(text, split, size, s.WORDS)
    languages = ["--source-lang", "a", "--target-lang", "b", "--joined-dictionary"]
    binarise(data, *languages, *prefixes(f"{text}/", *SPLITS))


def recipe_of(settings: Any) -> Recipe:
    """The recipe whose text a grid takes. It gets those settings alone that it is given here."""
    target = {"gpu": "demo", "multi30k": "multi30k"}[settings.PRESET]
    names = ("DATA", "URL", "SUMS", "MERGES") if target == "multi30k" else ()
    given = {name: str(getattr(settings, name)) for name in names if getattr(settings, name)}
    return recipe.read(target, {"PRESET": "cpu", "RUNS": str(settings.RUNS), **given})


def for_classes(settings: Any, folder: Path) -> None:
    """Pairs of sentences to pre-train on, and some that are translations or near misses, with their labels."""
    s, text, data = settings, folder / "text", folder / "bin"
    if (data / "label/dict.txt").exists():
        return
    if s.DATA:
        for language in s.PAIR.split("-"):
            extract(Path(s.DATA), [f"train.{language}"], text / f"raw/train.{language}")
        sentences = list(dict.fromkeys(pairs.read(text / "raw", s.PAIR)))
    else:
        sentences = pairs.generated(s.PRETRAIN + s.EXAMPLES + 2 * s.HELD_OUT, s.WORDS)
    pairs.write(text, sentences, s.PRETRAIN, s.EXAMPLES, s.HELD_OUT)
    binarise(data, "--only-source", "--nwordssrc", 8000, *prefixes(f"{text}/pretrain.", "train", "valid"))
    dictionary = ("--srcdict", data / "dict.txt")
    binarise(data / "input0", "--only-source", *dictionary, *prefixes(f"{text}/pairs.", *SPLITS))
    binarise(data / "label", "--only-source", *prefixes(f"{text}/label.", *SPLITS))


def unigram_entropy(data: Path, source: str, target: str) -> float:
    """The entropy of one target token, end of sentence included, over a binarised training set, in bits."""
    from fairseq.data.indexed_dataset import MMapIndexedDataset  # takes seconds, which few need

    dataset = MMapIndexedDataset(str(data / f"train.{source}-{target}.{target}"))
    counts = Counter(token for sentence in range(len(dataset)) for token in dataset[sentence].tolist())
    total = counts.total()
    return -math.fsum(count / total * math.log2(count / total) for count in counts.values())


def entropy(data: Path, pair: str, path: Path) -> None:
    """Of a target token, in bits."""
    if not path.exists():
        write_lines(path, [json.dumps({"bits": unigram_entropy(data, *pair.split("-"))})])
