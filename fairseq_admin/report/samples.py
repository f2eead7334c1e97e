"""Sentences of the test set with their translations, for a report."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

COUNT = 5
LINE = re.compile(r"(?P<kind>[STH])-(?P<number>\d+)\t(?P<text>.*)")
CUT = re.compile(r"@@( |$)")
"""The mark of byte-pair encoding inside a word."""


class Sample(NamedTuple):
    """A sentence, its translation by one run, and the reference; unknown ones are empty."""

    source: str
    hypothesis: str
    reference: str


def read_samples(folder: Path, noted: list[dict[str, str]]) -> list[Sample]:
    """A run's samples: its recipe's, or else sentences spread over the output of fairseq-generate.

    Args:
        folder: the run's, with generate.txt, or generate-SUBSET.txt of --results-path.
        noted: the recipe's samples: {source, hypothesis, reference} each.
    """
    if noted:
        return [Sample(**sample) for sample in noted]
    for path in sorted(folder.glob("generate*.txt")):
        if samples := _generated(path):
            return [samples[place * len(samples) // COUNT] for place in range(min(COUNT, len(samples)))]
    return []


def _generated(path: Path) -> list[Sample]:
    """The best hypothesis of each sentence, by number, with byte-pair encoding undone."""
    texts: dict[str, dict[int, str]] = {"S": {}, "T": {}, "H": {}}
    with path.open(encoding="utf-8", errors="replace") as lines:
        for match in filter(None, map(LINE.match, lines)):
            text = match["text"].partition("\t")[2] if match["kind"] == "H" else match["text"]
            texts[match["kind"]].setdefault(int(match["number"]), CUT.sub("", text))
    return [Sample(texts["S"].get(n, ""), text, texts["T"].get(n, "")) for n, text in sorted(texts["H"].items())]
