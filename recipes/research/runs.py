"""A run of a grid: an ordinary run of a recipe in the grid's folder, and its row.

The recipe's own steps make the text, train, resume and translate. A run that diverges is a result; any other failure is
an error, and leaves no result. Once result.csv is written, the checkpoints are removed.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from fairseq_admin.logs import Log
from recipes.options import Options
from recipes.processes import Diverged
from recipes.research.outcome import verdict
from recipes.research.rows import Row
from recipes.steps.checkpoints import furthest, newest
from recipes.steps.common import read_lines, write_lines
from recipes.steps.guard import locked
from recipes.steps.results import checked_log, commit, hardware, write_runs
from recipes.text import Step
from recipes.training import Run

GUESS = 0.5
"""Accuracy of a diverged classifier."""


def improved(valid: dict[int, float], patience: int, end: int) -> bool:
    """Whether the best validation up to update `end` is within the last `patience` updates."""
    before = [bits for update, bits in valid.items() if update <= end - patience]
    within = [bits for update, bits in valid.items() if end - patience < update <= end]
    return not before or min(within) < min(before)


def unigram_entropy(text: Path) -> float:
    """The entropy of a token of a text in bits, with ends of sentences as tokens."""
    lines = read_lines(text)
    counts = Counter(token for line in lines for token in line.split()) + Counter({"</s>": len(lines)})
    total = counts.total()
    return -math.fsum(count / total * math.log2(count / total) for count in counts.values())


def accuracy(log: Path, subset: str) -> float:
    """The last accuracy on a subset, 0 to 1, in a JSON log. fairseq logs per cent with three decimals."""
    logged = re.findall(rf'"{subset}_accuracy": "?([0-9.]+)', "\n".join(read_lines(log)))
    return round(float(logged[-1]) / 100, 5)


def cost(log: Log) -> Row:
    return {"params": log.params, "seconds": round(log.hours * 3600)}


class GridRun(Run):
    """A run of a grid up to some update.

    It is scored by its last checkpoint, unfolded, since a model that stayed on the plateau may not fold.
    """

    def __init__(self, grid: Any, axes: dict[str, str], updates: int = 0) -> None:
        self.grid, self.axes = grid, axes
        super().__init__(grid.recipe_of(axes, updates or grid.settings.UPDATES), grid.text_of(axes))
        self.folded, self.result = False, self.folder / "result.csv"

    def run_steps(self) -> list[Step]:
        return [step for step in super().run_steps() if step.name not in ("average", "model", "summary", "report")]

    def records(self) -> dict[Path, Options]:
        """One for all that the row depends on: a finished run has no checkpoints for another row."""
        whole = {"updates": str(self.grid.settings.UPDATES), "patience": str(self.grid.patience)}
        for options in super().records().values():
            whole |= options
        return {self.folder: whole}

    def train_with_patience(self) -> GridRun:
        """Train for PATIENCE updates at a time, until one such stretch brings no better validation.

        Only the log decides, so a killed and resumed run ends at the same update as any other. fairseq's --patience
        would count anew in each process.

        Returns:
            The run up to its last update.
        """
        whole, patience = self.length, min(self.grid.patience, self.length)
        for end in [*range(patience, whole, patience), whole]:
            part = type(self)(self.grid, self.axes, end)
            if furthest(self.folder, "updates") <= end and not part.is_done("train"):
                part.make("train")
            if not improved(checked_log(self.folder / "train.log").valid, patience, end):
                break
        return part

    def work(self) -> None:
        """Make the whole run, if it is not done."""
        with locked(self.folder / ".guard-result"):
            if self.result.exists():
                return
            last, diverged = self, False
            try:
                last = self.train_with_patience()
            except Diverged:
                diverged = True
            row = last.row(checked_log(self.folder / "train.log", unfinished=diverged), diverged)
            write_runs(self.result, [{**self.axes, **row, "hardware": hardware(), "commit": commit()}])
            shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
        print(", ".join(f"{name}: {row[name]}" for name in ("verdict", "bleu", "diverged", "test") if name in row))

    def _score(self) -> None:
        write_lines(self.score, [json.dumps(self.scores())])

    def row(self, log: Log, diverged: bool) -> Row:
        """The outcome of the run."""
        scores = {}
        if not diverged:
            self.final = newest(self.folder / "checkpoints") or self.final
            self.make("score")
            scores = json.loads(self.score.read_text(encoding="utf-8"))
        entropy = unigram_entropy(self.text.folder / f"bpe/train.{self.text.target}")
        kind, update = verdict(log, entropy, diverged)
        return {
            "verdict": kind,
            "update": update,
            "bits": None if diverged else log.valid[max(log.valid)],
            "entropy": entropy,
            "bleu": float(scores["score"]) if scores else None,
            "signature": scores.get("signature"),
            **cost(log),
            "valid": log.valid,
            "rule": self.recipe.rule,
        }
