"""A sign of divergence: the branches' share of a stack's outputs rises, and the loss does not fall.

A large share β makes a stack's output follow every change of its weights, the more the deeper it is (Liu et al. 2020,
section 4). A share that rises is not a bad sign alone: Admin's begins small and grows while the model learns. In the
runs that were tried (docs/monitor.md) the loss fell meanwhile in those that learned, and stood still, then rose, in
those that diverged.
"""

from __future__ import annotations

import math

SLOW, FAST = 0.05, 0.3
"""Weights of a new measurement in the running levels: means over about 20 measurements, and over about 3."""
RISE = 1.02
"""The share rises where the fast level is above so many times the slow one."""
FALL = 0.99
"""The loss falls where the fast level is below so many times the slow one."""
ENOUGH = 20
"""Measurements before the first sign: the slow level needs so many. Also how many without a sign make the next new."""


class Level:
    """A slow and a fast running mean of a value; the mean of all at first."""

    def __init__(self) -> None:
        self.count = 0
        self.slow = self.fast = 0.0
        self.calm = ENOUGH
        """Of a share's, how many measurements in a row were without the sign."""

    def take(self, value: float) -> None:
        self.count += 1
        self.slow += max(SLOW, 1 / self.count) * (value - self.slow)
        self.fast += max(FAST, 1 / self.count) * (value - self.fast)


class DivergenceRule:
    """Takes the measurements of one run in their order, and says when they show the sign."""

    def __init__(self) -> None:
        self.loss = Level()
        self.shares: dict[str, Level] = {}

    def warnings(self, update: int, shares: dict[str, float], loss: float) -> list[str]:
        """What to say after one more measurement; one line a stack, when the sign is new.

        One that is not finite, as an overflow gives, tells nothing and would stay in the levels.

        Args:
            update: the number of the update that was measured.
            shares: mean β of each stack's sub-layers.
            loss: the training loss of the update.
        """
        if not all(map(math.isfinite, (loss, *shares.values()))):
            return []
        self.loss.take(loss)
        falls = self.loss.fast < FALL * self.loss.slow
        lines = []
        for side, share in shares.items():
            level = self.shares.setdefault(side, Level())
            level.take(share)
            if level.count <= ENOUGH or level.fast <= RISE * level.slow or falls:
                level.calm += 1
                continue
            if level.calm >= ENOUGH:
                lines.append(
                    f"update {update}: a sign of divergence. The branches' share of the {side}'s outputs rises (mean "
                    f"beta {level.fast:.3f}, before {level.slow:.3f}) and the loss does not fall "
                    f"({self.loss.fast:.3f}, before {self.loss.slow:.3f}). If it goes on, resume from an earlier "
                    "checkpoint with a lower --lr or a longer --warmup-updates."
                )
            level.calm = 0
        return lines
