"""The entropy of one target token, end of sentence included, over a binarised training set."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path


def unigram_entropy(data: Path, source: str, target: str) -> float:
    """In bits per token, of what fairseq-preprocess wrote.

    Raises:
        ValueError: the training set is missing.
    """
    from fairseq.data.indexed_dataset import MMapIndexedDataset  # takes seconds, which few need

    path = data / f"train.{source}-{target}.{target}"
    if not MMapIndexedDataset.exists(str(path)):
        raise ValueError(f"{path}: no binarised training set there; expected fairseq-preprocess output. Check it.")
    dataset = MMapIndexedDataset(str(path))
    counts = Counter(token for sentence in range(len(dataset)) for token in dataset[sentence].tolist())
    total = counts.total()
    return -math.fsum(count / total * math.log2(count / total) for count in counts.values())
