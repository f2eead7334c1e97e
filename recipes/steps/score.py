"""Score a test set's translations with sacreBLEU against the raw reference, and keep the result.

    D=runs/demo/data; python -m recipes.steps.score runs/demo/admin-cpu-s1 --raw $D/raw/test --text $D/text.json ...

reads RUN/generate.txt and RUN/train.log; writes RUN/translations.txt, RUN/score.json and a row of results.csv.
"""

import argparse
import csv
import json
import os
import platform
import re
import subprocess
from pathlib import Path

import torch
from sacrebleu.metrics import BLEU

from recipes.steps.common import read_lines, replacing, run, write_lines
from recipes.steps.logs import read_log
from recipes.steps.text import Text, remove_bpe

HYPOTHESIS = re.compile(r"H-(\d+)\t[^\t]*\t(.*)")
# One run is one row: the columns that tell runs apart, then what was measured.
KEY = ("recipe", "method", "preset", "seed")
COLUMNS = (*KEY, "params", "updates", "tokens", "score", "signature", "hours", "hardware", "commit")


def hypotheses(lines: list[str], count: int) -> list[str]:
    """The hypotheses of fairseq-generate's output in the order of the test set, still in BPE units.

    fairseq translates the longest sentences first and leaves out those that are too long for the model.

    Raises:
        ValueError: one is missing, comes twice, or has a number outside the test set.
    """
    found: dict[int, str] = {}
    for line in lines:
        if match := HYPOTHESIS.fullmatch(line):
            number = int(match[1])
            if number in found or number >= count:
                problem = "comes twice" if number in found else f"lies outside the {count} sentences of the test set"
                raise ValueError(f"hypothesis H-{number} {problem}; remove the generated text and generate it again.")
            found[number] = match[2]
    missing = [number for number in range(count) if number not in found]
    if missing:
        raise ValueError(
            f"{len(missing)} of {count} hypotheses are missing, the first for sentence {missing[0] + 1}; "
            "expected one for every sentence. Remove the generated text and generate it again."
        )
    return [found[number] for number in range(count)]


def commit() -> str:
    """The commit of the code that ran, with "-dirty" after changes; "unknown" outside a git repository."""
    git = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def hardware() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{os.cpu_count()} x {platform.machine()} CPU"


def keep(table: Path, row: dict[str, object]) -> None:
    """Put the row into the table, in place of an older one of the same run.

    Raises:
        ValueError: the table has other columns.
    """
    rows = []
    if table.exists():
        with table.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{table}: expected the columns {','.join(COLUMNS)}. Move the file away and run again.")
    rows = [old for old in rows if any(old[name] != str(row[name]) for name in KEY)]
    with replacing(table) as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*rows, row])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--raw", required=True, help="prefix of the raw test set: RAW.de, RAW.en")
    parser.add_argument("--text", type=Path, required=True, help="text.json")
    parser.add_argument("--results", type=Path, required=True, help="the table of results to update")
    parser.add_argument("--tokens", required=True, help="tokens an update, for the table")
    for name in KEY:
        parser.add_argument(f"--{name}", required=True, help="for the table")
    args = parser.parse_args()

    text = Text.read(args.text)
    references = read_lines(f"{args.raw}.{text.target}")
    units = hypotheses(read_lines(args.run / "generate.txt"), len(references))
    translations = [text.detokenise(remove_bpe(line)) for line in units]
    metric = BLEU()
    score = metric.corpus_score(translations, [references]).score
    log = read_log(args.run / "train.log")
    row = {name: getattr(args, name) for name in KEY} | {
        "params": log.params,
        "updates": max(log.train),
        "tokens": args.tokens,
        "score": f"{score:.2f}",
        "signature": str(metric.get_signature()),
        "hours": f"{log.hours:.2f}",
        "hardware": hardware(),
        "commit": commit(),
    }
    write_lines(args.run / "translations.txt", translations)
    keep(args.results, row)
    write_lines(args.run / "score.json", [json.dumps(row, indent=2)])


if __name__ == "__main__":
    run(main)
