"""A sign of divergence: the branches' share of a stack's outputs rises, and the loss does not fall.

With a large share β, a stack's output follows every change of its weights, and more so in a deeper stack (Liu et al.
2020, section 4). A rising share alone is not a bad sign: Admin's begins small and grows while the model learns. In our
trials (docs/monitor.md) the loss fell meanwhile in runs that learned; in runs that diverged it stood still, then rose.
"""

from __future__ import annotations

import math

SLOW, FAST = 0.05, 0.3
"""Weights of a new measurement in the running levels: means over about 20 measurements, and over about 3."""
RISE = 1.02
"""The share rises if the fast level is above RISE times the slow one."""
FALL = 0.99
"""The loss falls if the fast level is below FALL times the slow one."""
ENOUGH = 20
"""Number of measurements before the first sign, and of measurements without a sign before the next sign."""


class Level:
    """A slow and a fast running mean of a value. At first both are the mean of all values so far."""

    def __init__(self) -> None:
        self.count = 0
        self.slow = self.fast = 0.0
        self.calm = ENOUGH
        """For a share: the number of measurements in a row without a sign of divergence."""

    def take(self, value: float) -> None:
        """Add a measurement.

        Args:
            value: a finite number.
        """
        self.count += 1
        self.slow += max(SLOW, 1 / self.count) * (value - self.slow)
        self.fast += max(FAST, 1 / self.count) * (value - self.fast)


class DivergenceRule:
    """Reads the measurements of one run in order, and decides when they show the sign of divergence."""

    def __init__(self) -> None:
        self.loss = Level()
        self.shares: dict[str, Level] = {}

    def warnings(self, update: int, shares: dict[str, float], loss: float) -> list[str]:
        """Take one more measurement, and warn of new signs.

        A measurement that is not finite, as after an overflow, is ignored: the running means would never be finite
        again.

        Args:
            update: the number of the measured update.
            shares: mean β of each stack's sub-layers, by side.
            loss: the training loss of the update.

        Returns:
            One line for each stack with a new sign.
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
