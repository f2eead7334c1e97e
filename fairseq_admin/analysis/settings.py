"""What a measure may be told besides its model and sentences; a result says it too."""

from __future__ import annotations

from typing import NamedTuple


class Settings(NamedTuple):
    """The options of the measures. A measure reads those that it has a use for."""

    depths: tuple[int, ...] | None = None
    """How many layers to measure at; None: the measure's own."""
    repeats: int = 3
    """Over how many random draws a mean is taken."""
    lr: float = 1e-4
    """The learning rate of an optimizer's update."""
    updates: int = 10
    """How many updates a fresh model makes."""
