"""The table of measures, and their settings. A new measure is a new file and a new row."""

from __future__ import annotations

from typing import NamedTuple


class Measure(NamedTuple):
    """A row of the table: a text for --help, and the kind of subject."""

    text: str
    of: str = "model"
    """A "model" and sentences; "checkpoints" of one run, and sentences; or a model's "weights"."""


class Settings(NamedTuple):
    """Settings of measures, besides model and sentences. Each measure reads those that it needs."""

    depths: tuple[int, ...] | None = None
    """Numbers of layers to measure at; None: the measure's default."""
    repeats: int = 3
    """Number of random draws in a mean."""
    lr: float = 1e-4
    """The learning rate of an optimizer's update."""
    updates: int | None = None
    """Updates by an optimizer; None: the measure's default."""


MEASURES: dict[str, Measure] = {
    "dependency": Measure("on which branches each sub-layer's output depends"),
    "output-change": Measure("how far a small change of the weights moves the output, against depth"),
    "gradients": Measure("gradient norms of sub-layers' outputs and of feed-forward weights"),
    "updates": Measure("gradients and changes of the weights from checkpoint to checkpoint", "checkpoints"),
    "omega": Measure("omega by sub-layer: profiled, trained, and by the depth rules", "weights"),
}
