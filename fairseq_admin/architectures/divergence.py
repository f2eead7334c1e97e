"""Stops a diverged run that fairseq does not stop: every update is skipped, or the loss is absurd but finite.

Under fp16 fairseq skips an update whose gradient overflows and lowers the loss scale. With --threshold-loss-scale above
--min-loss-scale the scale stops falling, and a diverged run skips updates forever. A model is told the number of
updates before every batch, so it can see when that number no longer grows. In fp32 and bf16 fairseq stops at the first
gradient that is not finite, but normalised layers keep gradients finite while the loss grows without bound.
"""

from __future__ import annotations

import torch
from fairseq.logging import metrics

from ..errors import DIVERGED_ADVICE, AdminError, DivergedError

EXPLODED = 20
"""A run has diverged if its loss exceeds this multiple of the first loss. Small runs that recovered reached 8."""


class ExplodedLoss:
    """Compares the training loss that fairseq logged last with the first one, or with 1 if the first is below 1."""

    def __init__(self) -> None:
        self.first: float | None = None

    def check(self) -> None:
        """Wait for the device, and compare.

        Raises:
            DivergedError: the loss is more than EXPLODED times the first.
        """
        meter = metrics.get_meter("default", "loss")
        if meter is None or meter.val is None:
            return
        loss = float(meter.val)
        if self.first is None:
            self.first = loss
        if loss > EXPLODED * max(self.first, 1):
            raise DivergedError(
                f"training diverged: the loss is {loss:.3g} and was {self.first:.3g}. {DIVERGED_ADVICE}"
            )


def gpu_out_of_memory() -> int:
    """Number of times that this process's GPU has run out of memory. fairseq skips those batches too."""
    return torch.cuda.memory_stats().get("num_ooms", 0) if torch.cuda.is_initialized() else 0


class SkippedUpdates:
    """Counts skipped updates in a row.

    Args:
        limit: largest number of skipped updates; 0: no limit.
        batches_per_update: batches in one update (--update-freq).
    """

    def __init__(self, limit: int, batches_per_update: int) -> None:
        self.limit = limit
        self.batches_per_update = batches_per_update
        self.restart()

    def restart(self) -> None:
        """Start counting again."""
        self.num_updates = -1
        self.batches = 0
        self.out_of_memory_before = 0

    def before_batch(self, num_updates: int) -> None:
        """Count a batch.

        Args:
            num_updates: number of updates so far.

        Raises:
            DivergedError: the last `limit` updates were skipped.
            AdminError: they were skipped, and memory ran out meanwhile.
        """
        if num_updates != self.num_updates:
            self.num_updates, self.batches = num_updates, 0
            self.out_of_memory_before = gpu_out_of_memory()
        self.batches += 1
        if self.limit and self.batches > self.limit * self.batches_per_update:
            skipped = f"update {num_updates} was skipped {self.limit} times in a row"
            sets = "--admin-max-skipped-updates sets the limit, 0 lifts it."
            if times := gpu_out_of_memory() - self.out_of_memory_before:
                raise AdminError(
                    f"{skipped}; the GPU ran out of memory {times} times. Resume with a smaller --max-tokens and a "
                    f"larger --update-freq. {sets}"
                )
            raise DivergedError(
                f"{skipped} (gradient overflow); the loss has most likely diverged. {DIVERGED_ADVICE} {sets}"
            )
