"""Translate the test set with one cell of a grid, and write down how the cell came out.

    python -m recipes.compare.result RUN/admin-18l-s1 scheme=admin --data RUN/bin --entropy RUN/entropy.json -- ...

writes CELL/generate.txt, CELL/result.json, and removes the cell's checkpoints. What follows -- goes to
fairseq-generate. A run that stopped itself has no translations and no score. With --text and --raw the score is of the
detokenised translations against the text as it was published, else of the tokens.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from sacrebleu.metrics import BLEU

from recipes.compare import cells
from recipes.compare.one_gpu import one_gpu
from recipes.compare.verdict import left_plateau, verdict
from recipes.steps import languages
from recipes.steps.checkpoints import newest
from recipes.steps.common import read_lines, read_object, replacing, run
from recipes.steps.guard import alone
from recipes.steps.logs import read_log
from recipes.steps.score import hypotheses
from recipes.steps.text import Text

TARGET = re.compile(r"T-(\d+)\t(.*)")


def references(lines: list[str]) -> list[str]:
    """The references in fairseq-generate's output, in the order of the test set."""
    found = {int(match[1]): match[2] for match in map(TARGET.fullmatch, lines) if match}
    return [found[number] for number in sorted(found)]


def bleu(lines: list[str]) -> tuple[float, str]:
    """sacreBLEU of fairseq-generate's output, on its tokens as they are, and its signature."""
    expected = references(lines)
    metric = BLEU(tokenize="none")
    score = metric.corpus_score(hypotheses(lines, len(expected)), [expected]).score
    return score, str(metric.get_signature())


def published_bleu(lines: list[str], text: Text, expected: list[str]) -> tuple[float, str]:
    """The same of the detokenised translations, on the references `expected` as they were published."""
    metric = languages.metric(text)
    found = [text.detokenise(tokens) for tokens in hypotheses(lines, len(expected))]
    return metric.corpus_score(found, [expected]).score, str(metric.get_signature())


def generate(cell: Path, data: Path, options: list[str], jobs: int) -> None:
    """Run fairseq-generate with the cell's last checkpoint; its whole output, or no file."""
    path = newest(cell / "checkpoints")
    command = [sys.executable, "-m", "fairseq_cli.generate", str(data), "--user-dir", "fairseq_admin"]
    command += ["--path", str(path), "--gen-subset", "test", "--required-batch-size-multiple", "1", *options]
    with replacing(cell / "generate.txt") as part:
        with part.open("wb") as out, one_gpu(cell.parent, jobs) as environment:
            status = subprocess.run(command, env=environment, stdout=out, stderr=subprocess.STDOUT).returncode
        if status:
            output = part.read_bytes().decode("utf-8", "replace").strip()
            raise ValueError(f"{cell}: fairseq-generate ended with status {status}: {output.splitlines()[-1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--entropy", type=Path, required=True, help="recipes.compare.entropy's file")
    parser.add_argument("--text", type=Path, help="text.json of a text that was tokenised")
    parser.add_argument("--raw", help="prefix of that text's raw test set: RAW.de, RAW.en")
    parser.add_argument("--protocol", type=Path, help="a page that says beforehand what the run is for")
    args, options = cells.parsed(parser)
    with alone(args.cell / ".guard"):  # another make of the same grid may be at it
        judge(args, options)


def last_change(page: Path) -> str:
    """The commit that last changed a page, for the row of a run made under it.

    Raises:
        ValueError: the page is not committed, or was changed since.
    """
    git = ["git", "-C", str(page.parent)]
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", page.name], capture_output=True).returncode
    found = subprocess.run([*git, "log", "-1", "--format=%H", "--", page.name], capture_output=True, text=True)
    if changed or not found.stdout.strip():
        raise ValueError(f"{page}: not committed as it is; expected a page that was there before the run. Commit it.")
    return found.stdout.strip()[:12]


def judge(args: argparse.Namespace, options: list[str]) -> None:
    """Translate with the cell's last checkpoint, and write down how it came out."""
    stopped = cells.stopped(args)
    expected = "recipes.compare.entropy's file. Remove it, and make it again"
    entropy = read_object(args.entropy, {"bits": float}, expected)["bits"]
    log = read_log(args.cell / "train.log", unfinished=stopped)
    found = verdict(log, entropy, stopped)
    score, signature = None, None
    if not stopped:
        if not (args.cell / "generate.txt").exists():
            generate(args.cell, args.data, options, args.jobs)
        lines = read_lines(args.cell / "generate.txt")
        if args.text:
            text = Text.read(args.text)
            score, signature = published_bleu(lines, text, read_lines(f"{args.raw}.{text.target}"))
        else:
            score, signature = bleu(lines)
    row = {
        "verdict": found.kind,
        "update": found.update,
        "bits": None if stopped else log.valid[max(log.valid)],
        "left": left_plateau(log.valid, entropy),
        "entropy": entropy,
        "bleu": score,
        "signature": signature,
        "params": log.params,
        "seconds": round(log.hours * 3600),
        "train": log.train,
        "valid": log.valid,
        **({"protocol": last_change(args.protocol)} if args.protocol else {}),
    }
    where = "" if found.update is None else f" by update {found.update}"
    scored = "" if score is None else f", BLEU {score:.2f}"
    cells.ended(args, row, f"{found.kind}{where}{scored}")


if __name__ == "__main__":
    run(main)
