"""Compare the log-probabilities of two checkpoints on random and on real sentences.

Translation models and language models have a decoder. The decoder's input shows which positions are padding.

T time   B batch   V vocabulary
"""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from fairseq import tasks
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from torch import Tensor

from .. import fingerprint
from ..bar import progress
from ..errors import explained
from ..method.folding import largest_difference
from .building import build
from .checkpoint import Checkpoint
from .stock import max_positions

PAD, EOS, FIRST_WORD = 1, 2, 4
"""Indices in every fairseq dictionary: padding, end of sentence, first word."""


Batch = dict[str, Tensor]
"""fairseq's `net_input`: src_tokens (B, T), src_lengths (B,), and prev_output_tokens (B, T) of a translation model."""


def random_batches(checkpoint: Checkpoint, batches: int = 3, sentences: int = 8, longest: int = 40) -> list[Batch]:
    """Draw sentences of random words and lengths, padded as fairseq pads them.

    The sentences are the same for all models with the same vocabulary.

    Args:
        checkpoint: the model's checkpoint.
        batches: number of batches.
        sentences: number of sentences per batch.
        longest: largest number of words in a sentence.

    Returns:
        The batches.
    """
    generator = torch.Generator().manual_seed(1)
    longest = min(longest, *(max_positions(checkpoint, stack) for stack in checkpoint.stacks))
    places = torch.arange(longest)

    def side_of(stack: str) -> Tensor:
        symbols = checkpoint.vocabulary[stack]
        words = torch.randint(min(FIRST_WORD, symbols - 1), symbols, (sentences, longest), generator=generator)
        lengths = torch.randint(1, longest + 1, (sentences, 1), generator=generator)
        if stack == "encoder":
            words[:, -1] = EOS
            return words.masked_fill_(places < longest - lengths, PAD)
        words[:, 0] = EOS
        return words.masked_fill_(places >= lengths, PAD)

    def batch() -> Batch:
        inputs = dict(zip(("src_tokens", "prev_output_tokens"), map(side_of, checkpoint.stacks)))
        return {**inputs, "src_lengths": inputs["src_tokens"].ne(PAD).sum(1)}

    return [batch() for _ in range(batches)]


def reading(data: Path, lacking: str = "no data to check on") -> contextlib.AbstractContextManager[None]:
    """A block in which fairseq reads binarised data, which may be damaged.

    Args:
        data: the folder of the data.
        lacking: what the message says is missing.

    Raises:
        AdminError: the block failed.
    """
    return explained(f"{data}: {lacking}", "Give the folder fairseq-preprocess wrote.")


def data_of(checkpoint: Checkpoint, data: Path, split: str) -> FairseqTask:
    """Set up the checkpoint's task over binarised data, and load a split.

    Args:
        checkpoint: the model's checkpoint.
        data: the folder that fairseq-preprocess wrote.
        split: the split's name, such as "valid".

    Returns:
        fairseq's task.

    Raises:
        AdminError: the folder has no such split, or its dictionaries are not those of the model.
    """
    options = checkpoint.options.task
    args = Namespace(**{**options, "task": options["_name"], "data": str(data)})
    del args._name
    with reading(data):
        task = tasks.setup_task(args)
        task.load_dataset(split)
    words_of = {"encoder": task.source_dictionary, "decoder": task.target_dictionary}
    for stack in checkpoint.stacks:
        size, expected = checkpoint.vocabulary[stack], checkpoint.text.get(stack)
        fingerprint.refuse_other_dictionary(words_of[stack], data, size, expected)
    return task


def real_batches(checkpoint: Checkpoint, data: Path, split: str = "valid", batches: int = 4) -> list[Batch]:
    """Load the first batches of a split.

    Args:
        checkpoint, data, split: see `data_of`.
        batches: largest number of batches.

    Returns:
        The batches.

    Raises:
        AdminError: see `data_of`.
    """
    task = data_of(checkpoint, data, split)
    with reading(data):
        iterator = task.get_batch_iterator(
            task.dataset(split),
            max_tokens=max(2048, checkpoint.options.task.get("tokens_per_sample") or 0),
            max_positions=task.max_positions(),
            ignore_invalid_inputs=True,
        ).next_epoch_itr(shuffle=False)
        return [sample["net_input"] for _, sample in zip(range(batches), iterator)]


def log_probabilities(model: BaseFairseqModel, batches: Sequence[Batch]) -> Iterator[Tensor]:
    """Compute log-probabilities at the target positions, without padding.

    Args:
        model: a model in evaluation mode.
        batches: see `random_batches`.

    Yields:
        The log-probabilities of each batch. Shape (positions, V).
    """
    with torch.no_grad():
        for batch in progress("compare", batches, " batches"):
            scores = model.get_normalized_probs(model(**batch), log_probs=True)
            yield scores[batch.get("prev_output_tokens", batch["src_tokens"]).ne(PAD)]


def verify(one: Checkpoint, other: Checkpoint, data: Path | None = None) -> tuple[float, int]:
    """Compare two checkpoints, with one model in memory at a time.

    Args:
        one, other: checkpoints of the same vocabulary.
        data: binarised data to compare on, in addition to random sentences.

    Returns:
        The largest difference of log-probabilities, and the number of target positions.
    """
    batches = random_batches(one) + (real_batches(one, data) if data else [])
    expected = list(log_probabilities(build(one), batches))
    largest = max(map(largest_difference, log_probabilities(build(other), batches), expected))
    return largest, sum(len(scores) for scores in expected)
