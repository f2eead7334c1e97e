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
    given = sample["net_input"]
    if len(stacks) > 1:
        return {"encoder": given["src_tokens"], "decoder": given["prev_output_tokens"]}
    return {stacks[0]: given["src_tokens"]}


def tokens_in(sample: Mapping[str, Any], stacks: Sequence[str]) -> int:
    """How many real tokens the last stack is given."""
    return int(words_of(sample, stacks)[stacks[-1]].ne(PADDING).sum())


def from_data(task: Any, source: Source, stacks: Sequence[str]) -> list[dict[str, Any]]:
    """Batches of the task's split in an order that the seed gives, until there are enough tokens.

    Raises:
        AdminError: there are fewer than were asked for, or they cannot be read.
    """
    longest = max(BATCH, getattr(getattr(task, "args", None), "tokens_per_sample", 0) or 0)
    assert source.data is not None
    found: list[dict[str, Any]] = []
    held = 0
    with reading(source.data):
        batches = task.get_batch_iterator(
            task.dataset(source.split), max_tokens=longest, max_positions=longest, ignore_invalid_inputs=True,
            seed=source.seed,
        ).next_epoch_itr(shuffle=True)  # fmt: skip
        for sample in batches:
            found.append(sample)
            held += tokens_in(sample, stacks)
            if held >= source.tokens:
                return found
    advice = f"Give --tokens {held}, or another --split." if held else "Give another --split."
    raise AdminError(
        f"{source.data}: its {source.split} set has {held} tokens in sentences of up to {longest}, and {source.tokens} "
        f"were asked for. {advice}"
    )


def from_chance(vocabulary: Mapping[str, int], source: Source) -> list[dict[str, Any]]:
    """Batches of random words, without padding; what they are to predict is random too.

    Args:
        vocabulary: how many words each stack knows.
        source: how many tokens, and the seed.
    """
    generator = torch.Generator().manual_seed(source.seed)
    sentences = max(1, min(source.tokens, BATCH) // LENGTH)
    found = []
    for _ in range(-(-source.tokens // (sentences * LENGTH))):
        words = {
            stack: torch.randint(FIRST_WORD, symbols, (sentences, LENGTH), generator=generator)
            for stack, symbols in vocabulary.items()
        }
        last = list(vocabulary)[-1]
        target = torch.randint(FIRST_WORD, vocabulary[last], (sentences, LENGTH), generator=generator)
        given = {"src_tokens": next(iter(words.values())), "src_lengths": torch.full((sentences,), LENGTH)}
        if len(words) > 1:
            given["prev_output_tokens"] = words["decoder"]
        found.append({"net_input": given, "target": target})
    return found
