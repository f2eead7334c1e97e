"""One table: what can be measured. A new measure is a new file and a new row."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

from . import curves, dependency, gradients, omega, output_change, updates, variance


class Measure(NamedTuple):
    """A row of the table."""

    module: ModuleType
    """It has `measure(subject, settings) -> dict` and `draw(dict) -> Figure`."""
    text: str
    """What it measures, for --help."""
    several: bool = False
    """Whether it takes several checkpoints of one run."""
    modelless: bool = False
    """Whether it is of no model."""
    wordless: bool = False
    """Whether a checkpoint alone is enough, without sentences."""
    runs: bool = False
    """Whether it is of the folders of runs, instead of a model."""


MEASURES: dict[str, Measure] = {
    "dependency": Measure(dependency, "on which branches each sub-layer's output depends"),
    "output-change": Measure(output_change, "how far a small change of the weights moves the output, against depth"),
    "gradients": Measure(gradients, "gradient norms of sub-layers' outputs and of feed-forward weights"),
    "updates": Measure(updates, "gradients and changes of the weights from checkpoint to checkpoint", several=True),
    "variance": Measure(variance, "how Adam's and RAdam's step varies in the first updates; no model", modelless=True),
    "omega": Measure(omega, "omega by sub-layer: profiled, trained, and by the depth rules", wordless=True),
    "curves": Measure(curves, "training and validation perplexity, of runs' folders", several=True, runs=True),
}
