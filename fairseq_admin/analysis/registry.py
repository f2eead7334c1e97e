"""One table: what can be measured, and what a measure may be told. A new measure is a new file and a new row."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import NamedTuple


class Measure(NamedTuple):
    """A row of the table: what it measures, for --help, and what it is of."""

    text: str
    of: str = "model"
    """A "model" and sentences; "checkpoints" of one run, and sentences; a model's "weights"; "runs"; or "nothing"."""


class Settings(NamedTuple):
    """What a measure may be told besides its model and sentences. It reads what it has a use for."""

    depths: tuple[int, ...] | None = None
    """How many layers to measure at; None: the measure's own."""
    repeats: int = 3
    """Over how many random draws a mean is taken."""
    lr: float = 1e-4
    """The learning rate of an optimizer's update."""
    updates: int = 10
    """How many updates a fresh model makes."""


MEASURES: dict[str, Measure] = {
    "dependency": Measure("on which branches each sub-layer's output depends"),
    "output-change": Measure("how far a small change of the weights moves the output, against depth"),
    "gradients": Measure("gradient norms of sub-layers' outputs and of feed-forward weights"),
    "updates": Measure("gradients and changes of the weights from checkpoint to checkpoint", "checkpoints"),
    "variance": Measure("how Adam's and RAdam's step varies in the first updates; no model", "nothing"),
    "omega": Measure("omega by sub-layer: profiled, trained, and by the depth rules", "weights"),
    "curves": Measure("training and validation perplexity, of runs' folders", "runs"),
}


def module_of(what: str) -> ModuleType:
    """A measure's file, imported when it is asked for; `measure(subject, settings) -> dict`, `draw(dict) -> Figure`."""
    return importlib.import_module(f".{what.replace('-', '_')}", __package__)
