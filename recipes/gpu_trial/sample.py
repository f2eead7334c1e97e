"""A corpus of random units in fairseq's binary form, to time and weigh training before there is text."""

from __future__ import annotations

import math
from pathlib import Path

# Of a text of sentences, the deviation of the logarithm of their lengths (WMT'14 En-De after BPE: 0.6 to 0.7).
SPREAD = 0.6


def write_sample(
    folder: Path, pair: tuple[str, str], means: tuple[float, float], longest: int, words: int, tokens: int
) -> int:
    """Write train.* and both dictionaries; of one language twice, as of a language model's text, one of each.

    Args:
        means: units of a sentence of either language, its end among them.
        longest: units of the longest.
        words: of the dictionary.
        tokens: of the target side, at least.

    Returns:
        How many pairs there are.
    """
    import torch
    from fairseq.data import Dictionary
    from fairseq.data.indexed_dataset import make_builder

    torch.manual_seed(1)
    dictionary = Dictionary()
    for number in range(max(1, words - dictionary.nspecial)):
        dictionary.add_symbol(f"w{number}")
    pairs = max(64, math.ceil(tokens / means[1]))
    # Both sides of a pair are about as long, as translations are.
    normal = torch.randn(pairs) * SPREAD - SPREAD**2 / 2
    for language, mean in zip(pair, means):
        one = pair[0] == pair[1]
        dictionary.save(str(folder / ("dict.txt" if one else f"dict.{language}.txt")))
        prefix = str(folder / ("train" if one else f"train.{pair[0]}-{pair[1]}.{language}"))
        builder = make_builder(f"{prefix}.bin", "mmap", vocab_size=len(dictionary))
        lengths = (normal.exp() * mean).round().clamp(2, longest).int().tolist()
        units = torch.randint(dictionary.nspecial, len(dictionary), (sum(lengths),), dtype=torch.int)
        for sentence in units.split(lengths):
            sentence[-1] = dictionary.eos()
            builder.add_item(sentence)
        builder.finalize(f"{prefix}.idx")
    return pairs
