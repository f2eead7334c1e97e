"""Which claims do the results support? A claim that one scheme is ahead of another is data, and is checked like it.

    python -m recipes.compare.claims docs/claims.csv

names every claim that its page does not make or its runs do not support, and every sentence of README.md and docs/ that
compares in such words and is no claim. A row of the file:

    page, sentence    where it is claimed, word for word
    runs, layers      the runs.csv of the comparison, next to the file, and the depth
    one, other        the two schemes, each at its best learning rate and those that are as good
    measure           bits (validation) or bleu (test) of make compare, accuracy (test) of make deeper
    verdict           ahead, behind or no difference shown: of `one`, as recipes/compare/standing.py judges it
"""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Iterator
from pathlib import Path

from recipes.compare.grid_table import read_runs
from recipes.compare.standing import difference, judged, loss, score, standings
from recipes.deeper import standing as deeper
from recipes.steps.common import run

COLUMNS = ("page", "sentence", "runs", "layers", "one", "other", "measure", "verdict")
MEASURES = {
    "bits": (read_runs, standings, loss, True),
    "bleu": (read_runs, standings, score, False),
    "accuracy": (deeper.read_runs, deeper.at_best_rates, deeper.accuracy, False),
}
"""How the runs are read and each scheme's best rate found; what is compared; whether lower is better."""
COMPARING = re.compile(r"\b(ahead of|behind|better than|worse than|beats?|outperforms?|no difference|level with)\b")
PAGES = ("README.md", "docs/results.md", "docs/schemes.md")


JUDGED = re.compile(r"(ahead|behind|no difference shown): [-+]")
"""How a cell begins that standing.py wrote: a test holds these tables to their runs."""


def sentences(text: str) -> Iterator[str]:
    """A page's sentences and those of its tables' cells, on one line each, without headings, code and verdicts."""
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.splitlines()
        cells = [cell.strip() for line in lines if line.startswith("|") for cell in line.split("|")]
        prose = "\n".join(line for line in lines if not re.match(r"#|\||    ", line))
        for part in [prose, *(cell for cell in cells if not JUDGED.match(cell))]:
            yield from filter(None, (re.sub(r"\s+", " ", it).strip() for it in re.split(r"(?<=[.!?])\s", part)))


def judge(claim: dict[str, str], folder: Path) -> str:
    """What the runs show of a claim's two schemes.

    Raises:
        ValueError: the runs have not got one of the two, or the measure is unknown.
    """
    if claim["measure"] not in MEASURES:
        raise ValueError(f"{claim['sentence']}: measure is {claim['measure']}; expected {', '.join(MEASURES)}.")
    read, stand, measure, lower_is_better = MEASURES[claim["measure"]]
    found = stand(read(folder / claim["runs"]))
    them = {standing.scheme: standing for standing in found if standing.layers == claim["layers"]}
    if missing := [name for name in (claim["one"], claim["other"]) if name not in them]:
        raise ValueError(
            f"{folder / claim['runs']}: found no run of {missing[0]} at {claim['layers']} layers, which a claim needs."
        )
    return judged(difference(them[claim["one"]], them[claim["other"]], measure), lower_is_better)


def faults(file: Path, root: Path) -> Iterator[str]:
    """What is wrong, a line each."""
    with open(file, encoding="utf-8", newline="") as source:
        reader = csv.DictReader(source)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{file}: found the columns {reader.fieldnames}; expected {', '.join(COLUMNS)}.")
        claims = list(reader)
    said = {page: list(sentences((root / page).read_text(encoding="utf-8"))) for page in PAGES}
    for claim in claims:
        if claim["sentence"] not in said.get(claim["page"], []):
            yield f"{claim['page']} does not say: {claim['sentence']}"
        shown = judge(claim, file.parent)
        if shown != claim["verdict"]:
            yield f"{claim['sentence']} {claim['runs']} shows: {claim['one']} against {claim['other']}, {shown}"
    known = {(claim["page"], claim["sentence"]) for claim in claims}
    for page, lines in said.items():
        for line in lines:
            if COMPARING.search(line) and (page, line) not in known:
                yield f"{page} compares, and {file.name} has no such claim: {line}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("claims", type=Path)
    args = parser.parse_args()
    found = list(faults(args.claims, Path()))
    if found:
        raise ValueError("\n".join(found))


if __name__ == "__main__":
    run(main)
