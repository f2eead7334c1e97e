"""The report's tables: a row a fact, a column a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from ..analysis.curves import perplexity
from .runs import Run, best

MEASURES = {
    "score": ("sacreBLEU", "signature"),
    "tokenised": ("BLEU of tokens", "tokenised_signature"),
    "compound": ("BLEU, compounds split", "compound_signature"),
    "perplexity": ("perplexity of the test set", ""),
}
"""What a score.json may hold: its title, and where its signature is."""


class Row(NamedTuple):
    """One fact of every run; None where it is not known."""

    title: str
    cells: list[str | None]

    @property
    def differs(self) -> bool:
        return len(set(self.cells)) > 1


def _rows(runs: list[Run], facts: dict[str, Callable[[Run], Any]]) -> list[Row]:
    """The facts that some run has."""
    rows = [Row(title, [str(fact(run) or "") or None for run in runs]) for title, fact in facts.items()]
    return [row for row in rows if any(row.cells)]


def glance(runs: list[Run]) -> list[Row]:
    """What each run is, and how far it came."""

    def count(run: Run, key: str) -> str:
        value = run.score.get(key) or (getattr(run.log, key, 0) if run.log else 0)
        return f"{int(value):,}" if value else ""

    def lowest(run: Run, place: int) -> str:
        found = best(run.log.valid) if run.log else None
        return (f"{found[0]:,}", f"{perplexity(found[1]):.2f}")[place] if found else ""

    def time(run: Run, key: str) -> str:
        return f"{getattr(run.log, key):.2f}" if run.log and getattr(run.log, key) else ""

    return _rows(
        runs,
        {
            "scheme": lambda run: run.scheme,
            "layers": lambda run: "-".join(map(str, run.layers.values())),
            "width": lambda run: run.options.get("--encoder-embed-dim", run.options.get("--decoder-embed-dim")),
            "parameters": lambda run: count(run, "params"),
            "tokens an update, at most": lambda run: count(run, "tokens"),
            "updates": lambda run: f"{run.updates:,}" if run.updates else "",
            "epochs": lambda run: time(run, "epochs"),
            "hours of updates": lambda run: time(run, "hours"),
            "lowest validation perplexity": lambda run: lowest(run, 1),
            "at update": lambda run: lowest(run, 0),
            "sacreBLEU": lambda run: run.score.get("score"),
            "test perplexity": lambda run: run.score.get("perplexity"),
        },
    )


def origin(runs: list[Run]) -> list[Row]:
    """By what, from what, on what and with what a run was made."""

    def hardware(run: Run) -> str:
        gpus = run.log.gpus if run.log else ()
        return run.score.get("hardware", "") or ", ".join(
            f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)
        )

    def versions(run: Run) -> str:
        found = run.about.get("versions") or ({"fairseq-admin": run.version} if run.version else {})
        return ", ".join(f"{name} {version}" for name, version in found.items())

    return _rows(
        runs,
        {
            "folder": lambda run: run.folder,
            "command": lambda run: run.about.get("command"),
            "commit": lambda run: run.score.get("commit"),
            "versions": versions,
            "hardware": hardware,
        },
    )


def options(runs: list[Run]) -> list[Row]:
    """Every option of some run; those that differ come first."""
    names = dict.fromkeys(name for run in runs for name in run.options)
    rows = [Row(name, [run.options.get(name) for run in runs]) for name in names]
    return sorted(rows, key=lambda row: not row.differs)


def _score(key: str, run: Run) -> Any:
    return run.score.get(key)


def scores(runs: list[Run]) -> list[Row]:
    """The test set's scores, and the papers' number of the same experiment."""
    rows = _rows(runs, {title: partial(_score, key) for key, (title, _) in MEASURES.items()})
    papers = _rows(runs, {"the paper's BLEU of tokens": lambda run: (run.about.get("paper") or {}).get("bleu")})
    return [*rows, *papers] if rows else []


def signatures(runs: list[Run]) -> list[tuple[str, str]]:
    """Of every score: what it is called, and the signature that says how it was computed."""
    found = [(title, run.score[key]) for run in runs for title, key in MEASURES.values() if run.score.get(key)]
    return list(dict.fromkeys(found))


def sources(runs: list[Run]) -> list[str]:
    """The papers that the numbers are from."""
    found = [(run.about.get("paper") or {}).get("source") for run in runs]
    return list(dict.fromkeys(filter(None, found)))


def translations(runs: list[Run]) -> list[dict[str, Any]]:
    """Sentences of the test set: {source, reference, hypotheses: one a run, or None}."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for number, run in enumerate(runs):
        for source, hypothesis, reference in run.samples:
            empty = {"source": source, "reference": reference, "hypotheses": [None] * len(runs)}
            found.setdefault((source, reference), empty)["hypotheses"][number] = hypothesis
    return list(found.values())
