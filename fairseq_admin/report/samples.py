"""Some sentences of the test set with their translations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import AdminError

COUNT = 5
LINE = re.compile(r"(?P<kind>[STH])-(?P<number>\d+)\t(?P<text>.*)")
PIECES = re.compile(r"@@( |$)")


class Sample(NamedTuple):
    """A sentence, its translation by one run, and the reference; empty where it is not known."""

    source: str
    hypothesis: str
    reference: str


def read(folder: Path, noted: list[dict[str, Any]]) -> list[Sample]:
    """A run's samples: what a recipe noted, or sentences from all over the output of fairseq-generate.

    Args:
        folder: the run's, with generate.txt or generate-SUBSET.txt, as --results-path writes it.
        noted: {source, hypothesis, reference} each.

    Raises:
        AdminError: one is not that.
    """
    if noted:
        if not all(isinstance(sample, dict) for sample in noted):
            raise AdminError(f"{folder}/run.json: found other samples than objects with a source. Make it again.")
        return [Sample(*(str(sample.get(name, "")) for name in Sample._fields)) for sample in noted]
    for path in sorted(folder.glob("generate*.txt")):
        if found := _generated(path):
            numbers = sorted(found)
            return [found[numbers[place * len(numbers) // COUNT]] for place in range(min(COUNT, len(numbers)))]
    return []


def _generated(path: Path) -> dict[int, Sample]:
    """The best hypothesis of each sentence by its number, byte-pair encoding undone."""
    texts: dict[str, dict[int, str]] = {"S": {}, "T": {}, "H": {}}
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if match := LINE.fullmatch(line.rstrip("\n")):
                text = match["text"].partition("\t")[2] if match["kind"] == "H" else match["text"]
                texts[match["kind"]].setdefault(int(match["number"]), PIECES.sub("", text))
    source, target, hypotheses = texts["S"], texts["T"], texts["H"]
    return {n: Sample(source.get(n, ""), text, target.get(n, "")) for n, text in hypotheses.items()}
