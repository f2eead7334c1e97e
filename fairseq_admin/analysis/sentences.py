"""The sentences that a model is measured on: from binarised data, or random words where that was asked for.

Batches are small, so that memory does not grow with the number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checkpoints.equivalence import reading
from ..errors import AdminError

PADDING, FIRST_WORD = 1, 4
"""Their indices in every dictionary of fairseq's."""
BATCH = 512
"""The most tokens a batch has, padding included; longer sentences are left out."""
LENGTH = 32
"""Of a sentence of random words."""


class Source(NamedTuple):
    """Where the sentences are from."""

    data: Path | None
    """A folder that fairseq-preprocess wrote; None: random words."""
    split: str
    tokens: int
    """How many real tokens the last stack is given, at least."""
    seed: int
    """Which sentences, or which random words; and a fresh model's weights."""


def words_of(sample: Mapping[str, Any], stacks: Sequence[str]) -> dict[str, Tensor]:
    """What each stack is given of one of fairseq's samples. Shapes (B, T)."""
    return dict(
        zip(stacks, (sample["net_input"][name] for name in ("src_tokens", "prev_output_tokens")[: len(stacks)]))
    )


def tokens_in(sample: Mapping[str, Any], stacks: Sequence[str]) -> int:
    """How many real tokens the last stack is given."""
    return int(words_of(sample, stacks)[stacks[-1]].ne(PADDING).sum())


def from_data(task: Any, source: Source, stacks: Sequence[str]) -> list[dict[str, Any]]:
    """Batches of the task's split in an order that the seed gives, until there are enough tokens.

    Raises:
        AdminError: there are fewer than were asked for, or they cannot be read.
    """
    assert source.data is not None
    longest = max(BATCH, getattr(getattr(task, "args", None), "tokens_per_sample", 0) or 0)
    limits = {"max_tokens": longest, "max_positions": longest, "ignore_invalid_inputs": True, "seed": source.seed}
    samples: list[dict[str, Any]] = []
    tokens = 0
    with reading(source.data):
        for sample in task.get_batch_iterator(task.dataset(source.split), **limits).next_epoch_itr(shuffle=True):
            samples.append(sample)
            tokens += tokens_in(sample, stacks)
            if tokens >= source.tokens:
                return samples
    raise AdminError(
        f"{source.data}: its {source.split} set has {tokens} tokens in sentences of up to {longest}, and "
        f"{source.tokens} were asked for. Give --tokens {tokens}, or another --split."
    )


def random_samples(vocabulary: Mapping[str, int], source: Source) -> list[dict[str, Any]]:
    """Batches of random words, without padding; what they are to predict is random too.

    Args:
        vocabulary: how many words each stack knows.
        source: how many tokens, and the seed.
    """
    generator = torch.Generator().manual_seed(source.seed)
    shape = (max(1, min(source.tokens, BATCH) // LENGTH), LENGTH)
    *_, last = vocabulary.values()
    samples = []
    for _ in range(-(-source.tokens // (shape[0] * LENGTH))):
        words = [torch.randint(FIRST_WORD, symbols, shape, generator=generator) for symbols in vocabulary.values()]
        target = torch.randint(FIRST_WORD, last, shape, generator=generator)
        inputs = dict(zip(("src_tokens", "prev_output_tokens"), words))
        samples.append({"net_input": {**inputs, "src_lengths": torch.full(shape[:1], LENGTH)}, "target": target})
    return samples
