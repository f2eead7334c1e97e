"""What a run's report needs to know besides its files: RUN/run.json, which `fairseq-admin report` reads."""

from __future__ import annotations

import csv
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from recipes.steps.common import read_lines, write_lines
from recipes.steps.results import read_score

PAPERS = Path(__file__).parents[1] / "papers.csv"
PACKAGES = ("fairseq-admin", "fairseq", "fairseq-fixed", "torch", "sacrebleu")
SAMPLES = 5


def papers() -> list[dict[str, str]]:
    """The papers' numbers, {recipe, method, bleu, source} each."""
    with PAPERS.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def paper(recipe: str, method: str, preset: str) -> dict[str, str] | None:
    """The papers' number of an experiment, {bleu, source}; None without one. A small run is no attempt at it."""
    found = {(row["recipe"], row["method"]): row for row in papers()}.get((recipe, method))
    return {name: found[name] for name in ("bleu", "source")} if found and preset in ("", "paper") else None


def versions() -> dict[str, str]:
    """Of Python, and of the packages that a result depends on."""
    there = {dist.metadata["Name"]: dist.version for dist in metadata.distributions()}
    return {"Python": platform.python_version(), **{name: there[name] for name in PACKAGES if name in there}}


def numbers(lines: int) -> list[int]:
    """Some sentences of a text of so many lines, from all over it, by their numbers from 0."""
    count = min(SAMPLES, lines)
    return [place * lines // count for place in range(count)]


def samples(run: Path, raw: str, pair: str) -> list[dict[str, str]]:
    """Sentences of the test set, {source, hypothesis, reference} each."""
    source, target = pair.split("-")
    texts = [read_lines(path) for path in (f"{raw}.{source}", run / "translations.txt", f"{raw}.{target}")]
    names = ("source", "hypothesis", "reference")
    return [dict(zip(names, (text[number] for text in texts))) for number in numbers(len(texts[2]))]


def write(run: Path, command: str, raw: str | None, pair: str | None) -> None:
    """Write RUN/run.json.

    Args:
        run: the run's folder, scored.
        command: the command that made it.
        raw: of a translation: prefix of the raw test set, of RAW.de and RAW.en.
        pair: of a translation: source and target, as in de-en.
    """
    score = read_score(run / "score.json")
    about: dict[str, Any] = {
        "command": f"{command} METHOD={score['method']} SEED={score['seed']}",
        "versions": versions(),
        "paper": paper(score["recipe"], score["method"], score["preset"]),
        "samples": samples(run, raw, pair) if raw and pair else [],
    }
    write_lines(run / "run.json", [json.dumps(about, indent=2, ensure_ascii=False)])
