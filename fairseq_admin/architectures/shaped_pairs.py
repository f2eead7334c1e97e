"""Training batches of few shapes, as `--admin-fast graph` needs them. The plain ones are those of fairseq's dataset.

fairseq pads a batch to its longest sentences, so nearly every batch of an epoch has its own shape. Here there are K
lengths. A pair counts in a batch as if its longer side had the next length, and a batch's sides are padded to quarters
of the length of its longest pair. Pairs are sorted by their longer side, the longest first, so a length has the same
number of pairs in each of its batches: as many as fit. K lengths then give about K shapes.

Lengths are closer where there are more pairs. If n(l) pairs have length l, and the lengths are w(l) apart, each l adds
n w / 2 tokens and uses 1 / w lengths. For a given K, padding is least where n w² is the same for all l: w ∝ 1 / √n.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from fairseq.data import LanguagePairDataset

from ..fast.graphs import MOST

NUMBERS = (48, 40, 33, 27, 22, 18, 15, 12, 10, 8)
"""Numbers of lengths to try, K."""
REPEATS = 6
"""Least number of batches per shape in an epoch. The first of a shape is not replayed."""
SIDES = ("source", "target")


class ShapedPairs(LanguagePairDataset):
    """fairseq's dataset of sentence pairs, in batches of few shapes.

    Attributes:
        lengths: the K lengths, ascending.
    """

    lengths = np.ones(1, dtype=np.int64)

    def _length(self, tokens: Any) -> Any:
        """The next of the K lengths, for each number of tokens. Any shape."""
        return np.maximum(tokens, self.lengths[np.searchsorted(self.lengths[:-1], tokens)])

    def padded(self, longest: Any) -> Any:
        """The lengths to which a batch's sides are padded, from those of their longest sentences. Shapes (2,)."""
        length = self._length(longest.max())
        return -(-length * -(-4 * longest // length) // 4)  # quarters, rounded up

    def num_tokens_vec(self, indices: Any) -> Any:
        """The tokens that each pair counts in a batch. Shapes (N,)."""
        return self._length(super().num_tokens_vec(indices))

    def batch_by_size(self, indices: Any, **limits: Any) -> list[Any]:
        """Choose the lengths, as many as leave few shapes, and make the batches of an epoch.

        Args:
            indices: of the pairs. Shape (N,).
            limits: of a batch, as fairseq names them.

        Returns:
            The indices of each batch.
        """
        sizes = np.sort(self.sizes[indices])
        indices = indices[np.lexsort(-sizes.T)]  # by the longer side, then by the shorter
        spacing = np.sqrt(np.bincount(sizes[:, 1])).cumsum()
        for number in NUMBERS:
            self.lengths = np.unique(np.searchsorted(spacing, np.linspace(0, spacing[-1], number + 1)[1:]))
            batches = super().batch_by_size(indices, **limits)
            shapes = {(len(batch), *self.padded(self.sizes[batch].max(0))) for batch in batches}
            if len(shapes) <= min(MOST, len(batches) / REPEATS):
                break
        return batches

    def collater(self, samples: Any, pad_to_length: Any = None) -> Any:
        """Make a batch of pairs as fairseq does, and pad it to its shape."""
        if samples:
            longest = np.max([[len(sample[side]) for side in SIDES] for sample in samples], 0)
            pad_to_length = dict(zip(SIDES, self.padded(longest).tolist()))
        return super().collater(samples, pad_to_length)


def shape_batches(task: Any) -> None:
    """Let a task make training batches of few shapes. It keeps the batches of a dataset that is not fairseq's own."""
    load = task.load_dataset

    def load_dataset(split: str, *arguments: Any, **options: Any) -> None:
        load(split, *arguments, **options)
        dataset = task.datasets[split]
        # Commands that load a checkpoint for evaluation name its options, task_cfg.
        training = split == task.cfg.train_subset and "task_cfg" not in options
        if training and type(dataset) is LanguagePairDataset and dataset.buckets is None:
            dataset.__class__ = ShapedPairs

    task.load_dataset = load_dataset
