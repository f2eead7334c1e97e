"""Stops a run whose optimizer refuses every update.

Under fp16 fairseq skips an update whose gradient overflows and lowers the loss scale. With --threshold-loss-scale above
--min-loss-scale the scale stops falling, and a diverged run skips updates for ever. A model is told the number of
updates before every batch, so it can see that the number stands still. (In fp32 and bf16 fairseq itself stops at the
first gradient that is not finite.)
"""

from __future__ import annotations

from ..errors import DIVERGED_ADVICE, DivergedError


class SkippedUpdates:
    """Counts training steps in a row that made no update.

    Args:
        limit: steps in a row to allow; 0 allows any number.
        batches_per_update: batches accumulated for one update (--update-freq).
    """

    def __init__(self, limit: int, batches_per_update: int) -> None:
        self.limit = limit
        self.batches_per_update = batches_per_update
        self.restart()

    def restart(self) -> None:
        """Forget every batch counted."""
        self.num_updates = -1
        self.batches = 0

    def before_batch(self, num_updates: int) -> None:
        """Call once a batch with the number of updates made so far.

        Raises:
            DivergedError: the number has stood still for more than `limit` updates' worth of batches.
        """
        if num_updates != self.num_updates:
            self.num_updates, self.batches = num_updates, 0
        self.batches += 1
        if self.limit and self.batches > self.limit * self.batches_per_update:
            raise DivergedError(
                f"update {num_updates} was skipped {self.limit} times in a row (overflow, or out of memory); the loss "
                f"has most likely diverged. {DIVERGED_ADVICE} --admin-max-skipped-updates sets the limit, 0 lifts it."
            )
