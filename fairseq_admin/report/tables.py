"""The tables of a report, and of a recipe's summary in the terminal: one row per fact, one column per run.

This file imports the standard library only: recipes need not wait for torch. A summary's runs have `log` and `score`
alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..logs import perplexity
from .run import Run

ROWS = 8
"""Largest number of losses shown of a run."""
SCORES = {
    "sacreBLEU": ("score", "signature"),
    "chrF2": ("chrf", "chrf_signature"),
    "BLEU of tokens": ("tokenised", "tokenised_signature"),
    "BLEU, compounds split": ("compound", "compound_signature"),
}
"""The keys of score.json for each score and for its signature."""


class Row(NamedTuple):
    """One fact about each run. If a run lacks it, its cell is empty."""

    title: str
    cells: list[str]

    @property
    def differs(self) -> bool:
        return len(set(self.cells)) > 1


def _rows(runs: Sequence[Run], facts: dict[str, Callable[[Run], Any]]) -> list[Row]:
    """The rows of facts that at least one run has."""
    rows = [Row(title, [str(fact(run) or "") for run in runs]) for title, fact in facts.items()]
    return [row for row in rows if any(row.cells)]


def _of_score(key: str) -> Callable[[Run], Any]:
    return lambda run: run.score.get(key)


RESULTS: dict[str, Callable[[Run], Any]] = {
    "sacreBLEU": _of_score("score"),
    "chrF2": _of_score("chrf"),
    "perplexity": _of_score("perplexity"),
    "parameters": lambda run: run.log and run.log.params,
    "updates": lambda run: run.log and run.log.updates,
    "hours": lambda run: run.log and f"{run.log.hours:.2f}",
}


def results(runs: Sequence[Run]) -> list[Row]:
    """Scores on the test set, and the cost of each run.

    Args:
        runs: runs with `log` and `score`.

    Returns:
        The rows.
    """
    return _rows(runs, RESULTS)


def losses(runs: Sequence[Run]) -> list[Row]:
    """Validation losses in bits per token, at up to ROWS updates of each run.

    Args:
        runs: runs with `log`.

    Returns:
        The rows.
    """
    curves = [run.log.valid if run.log else {} for run in runs]
    updates: set[int] = set()
    for curve in curves:
        step = -(-len(curve) // ROWS) or 1
        updates.update(sorted(curve)[::-step])
    return [
        Row(f"update {update}", [f"{curve[update]:.3f}" if update in curve else "" for curve in curves])
        for update in sorted(updates)
    ]


def glance(runs: Sequence[Run]) -> list[Row]:
    """The model of each run, and its progress.

    Args:
        runs: the runs of the report.

    Returns:
        The rows.
    """

    def lowest(run: Run, place: int) -> Any:
        finite = [(bits, update) for update, bits in (run.log.valid if run.log else {}).items() if math.isfinite(bits)]
        return (f"{perplexity(min(finite)[0]):.2f}", min(finite)[1])[place] if finite else None

    facts: dict[str, Callable[[Run], Any]] = {
        "scheme": lambda run: run.model.get("title"),
        "rule of ω": lambda run: run.model.get("rule"),
        "layers": lambda run: run.layers,
        "width": lambda run: run.model.get("width"),
        "tokens an update, at most": _of_score("tokens"),
        **RESULTS,
        "updates": lambda run: run.updates,
        "epochs": lambda run: run.log and f"{run.log.epochs:.2f}",
        "lowest validation perplexity": lambda run: lowest(run, 0),
        "at update": lambda run: lowest(run, 1),
    }
    return _rows(runs, facts)


def scores(runs: Sequence[Run]) -> list[Row]:
    """Scores on the test set, and the papers' number for the same experiment.

    Args:
        runs: the runs of the report.

    Returns:
        The rows.
    """
    facts = {title: _of_score(key) for title, (key, _) in SCORES.items()}
    rows = _rows(runs, {**facts, "perplexity": _of_score("perplexity")})
    paper = {"the paper's BLEU of tokens": lambda run: (run.about.get("paper") or {}).get("bleu")}
    return [*rows, *_rows(runs, paper)] if rows else []


def notes(runs: Sequence[Run]) -> list[str]:
    """The signature of every score, and the source of the papers' numbers.

    Args:
        runs: the runs of the report.

    Returns:
        The notes, each once.
    """
    computed = [f"{title}: {run.score[key]}" for run in runs for title, (_, key) in SCORES.items() if key in run.score]
    papers = [(run.about.get("paper") or {}).get("source") for run in runs]
    return list(dict.fromkeys([*computed, *(f"Paper: {source}." for source in papers if source)]))


def origin(runs: Sequence[Run]) -> list[Row]:
    """Folder, command, commit, versions and hardware of each run.

    Args:
        runs: the runs of the report.

    Returns:
        The rows.
    """

    def hardware(run: Run) -> str:
        gpus = run.log.gpus if run.log else ()
        return run.score.get("hardware") or ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))

    def versions(run: Run) -> str:
        packages = run.about.get("versions") or ({"fairseq-admin": run.version} if run.version else {})
        return ", ".join(f"{name} {version}" for name, version in packages.items())

    command = {"folder": lambda run: run.folder, "command": lambda run: run.about.get("command")}
    return _rows(runs, {**command, "commit": _of_score("commit"), "versions": versions, "hardware": hardware})


def options(runs: Sequence[Run]) -> list[Row]:
    """Every option of any run. Options that differ come first.

    Args:
        runs: the runs of the report.

    Returns:
        The rows.
    """
    names = dict.fromkeys(name for run in runs for name in run.options)
    rows = [Row(name, [run.options.get(name, "") for run in runs]) for name in names]
    return sorted(rows, key=lambda row: not row.differs)


def translations(runs: Sequence[Run]) -> list[tuple[str, list[str], str]]:
    """Sentences of the test set.

    Args:
        runs: the runs of the report.

    Returns:
        For each sentence: source, one translation per run, reference.
    """
    sentences: dict[tuple[str, str], list[str]] = {}
    for number, run in enumerate(runs):
        for source, hypothesis, reference in run.samples:
            sentences.setdefault((source, reference), [""] * len(runs))[number] = hypothesis
    return [(source, hypotheses, reference) for (source, reference), hypotheses in sentences.items()]
