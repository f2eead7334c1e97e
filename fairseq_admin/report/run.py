"""A run, as reports and the recipes' summaries show it. A part that is not known is empty.

This file imports the standard library only: recipes need not wait for torch.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .. import logs


class Sample(NamedTuple):
    """A sentence, its translation by one run, and the reference."""

    source: str
    hypothesis: str
    reference: str


@dataclass(eq=False)
class Run:
    """The parts of a run."""

    folder: Path
    name: str
    """Its unique name in the report."""
    log: logs.Log | None
    checkpoint: Path | None = None
    score: dict[str, Any] = field(default_factory=dict)
    """A recipe's score.json."""
    about: dict[str, Any] = field(default_factory=dict)
    """A recipe's run.json: {command, versions, paper, samples}."""
    samples: list[Sample] = field(default_factory=list)
    fold: str = ""
    """The output of `fairseq-admin fold`: its check."""
    analyses: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """The results of `fairseq-admin analyze`, by measure."""
    options: dict[str, str] = field(default_factory=dict)
    """The training's options: the main ones of fairseq's, and a recipe's settings of the text."""
    model: dict[str, Any] = field(default_factory=dict)
    """Its checkpoint's {scheme, title, rule, encoder_layers, decoder_layers, width, updates}."""
    layers: str = ""
    omega: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By stack, as `analysis.omega` measures it."""
    version: str = ""
    """The version of fairseq_admin that profiled it."""
    unfoldable: str = ""
    """The reason why `fairseq-admin fold` refuses its checkpoint; empty if it does not."""

    @property
    def updates(self) -> int:
        return max(self.model.get("updates", 0), self.log.updates if self.log else 0)

    @property
    def missing(self) -> dict[str, str]:
        """For every missing part, a line that says how to make it."""
        checkpoint, folder = (shlex.quote(str(path)) for path in (self.checkpoint or "CHECKPOINT", self.folder))
        no_log = (
            f"{self.folder} has no log: found no train.log; expected the output of fairseq-train. Train with "
            f"--log-format json and 2>&1 | tee -a {folder}/train.log, or copy the log there."
        )
        no_omega = f"{self.model['title']} has no ω." if self.model else f"{self.folder} has no checkpoint."
        fold = f"fairseq-admin fold {checkpoint} -o model.pt --data DATA | tee {folder}/fold.txt"
        parts: dict[str, tuple[Any, str]] = {
            "curves": (self.log, no_log),
            "scores": (self.score, f"{self.folder} has no score.json, which a recipe writes."),
            "translations": (self.samples, f"{self.folder} has no translations in run.json, which a recipe writes."),
            "omega": (self.omega, no_omega),
            "fold": (self.fold, self.unfoldable or f"Not checked: {fold}"),
        }
        for what in ("dependency", "output-change"):
            analyze = f"fairseq-admin analyze {what} {checkpoint} --data DATA -o {folder}/analysis/{what}"
            parts[what] = (self.analyses.get(what), f"Not measured: mkdir -p {folder}/analysis; {analyze}")
        return {part: text for part, (there, text) in parts.items() if not there}
