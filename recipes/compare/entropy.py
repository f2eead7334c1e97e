"""Measure the entropy of one target token, end of sentence included, over a binarised training set.

python -m recipes.compare.entropy runs/compare/bin --pair a-b -o runs/compare/entropy.json
"""

from __future__ import annotations

import argparse
import json
import logging
import math
from pathlib import Path

from fairseq.data import Dictionary, data_utils

from recipes.steps.common import run, write_lines


def unigram_entropy(data: Path, source: str, target: str) -> float:
    """In bits per token.

    Raises:
        ValueError: the training set is missing.
    """
    path = data / f"train.{source}-{target}.{target}"
    dataset = None
    if (data / f"dict.{target}.txt").exists():
        dataset = data_utils.load_indexed_dataset(str(path), Dictionary.load(str(data / f"dict.{target}.txt")))
    if dataset is None:
        raise ValueError(f"{path}: no binarised training set there; expected fairseq-preprocess output. Check it.")
    counts: dict[int, int] = {}
    for sentence in range(len(dataset)):
        for token in dataset[sentence].tolist():
            counts[token] = counts.get(token, 0) + 1
    total = sum(counts.values())
    return -math.fsum(count / total * math.log2(count / total) for count in counts.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--pair", required=True, help="source and target, as in a-b")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    logging.getLogger("fairseq").setLevel(logging.WARNING)
    source, target = args.pair.split("-")
    write_lines(args.output, [json.dumps({"bits": unigram_entropy(args.data, source, target)})])


if __name__ == "__main__":
    run(main)
