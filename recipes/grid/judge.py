"""How one run of a grid came out: its translations of the test set and their score, or a classifier's accuracy."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sacrebleu.metrics import BLEU

from fairseq_admin.logs import Log
from fairseq_admin.text.tokens import Text
from recipes.compare.outcome import left_plateau, verdict
from recipes.processes import produce
from recipes.steps.checkpoints import newest
from recipes.steps.common import read_lines
from recipes.steps.score import bleu_of, hypotheses

TARGET = re.compile(r"T-(\d+)\t(.*)")
GUESS = 0.5
Row = dict[str, Any]


def bleu(lines: list[str], text: Path | None = None, raw: str = "") -> tuple[float, str]:
    """sacreBLEU of fairseq-generate's output, and its signature.

    Args:
        text: text.json of a text that was tokenised; the score is then of the detokenised translations against that
            text as it was published, else of the tokens.
        raw: prefix of that text's test set.
    """
    if text:
        tokens = Text.read(text)
        references = read_lines(f"{raw}.{tokens.target}")
        metric, translations = bleu_of(tokens), hypotheses(lines, len(references))
        translations = [tokens.detokenise(line) for line in translations]
    else:
        numbered = {int(match[1]): match[2] for match in map(TARGET.fullmatch, lines) if match}
        references = [numbered[number] for number in sorted(numbered)]
        metric, translations = BLEU(tokenize="none"), hypotheses(lines, len(references))
    return metric.corpus_score(translations, [references]).score, str(metric.get_signature())


def generate(folder: Path, data: str, options: list[str]) -> list[str]:
    """The output of fairseq-generate with the run's last checkpoint."""
    path = folder / "generate.txt"
    if not path.exists():
        command = [sys.executable, "-m", "fairseq_cli.generate", data, "--user-dir", "fairseq_admin", "--path"]
        command += [str(newest(folder / "checkpoints")), "--gen-subset", "test"]
        produce([*command, "--required-batch-size-multiple", "1", *options], path)
    return read_lines(path)


def last_change(page: Path) -> str:
    """The commit that last changed a page, for the row of a run made under it.

    Raises:
        ValueError: the page is not committed, or was changed since.
    """
    git = ["git", "-C", str(page.parent)]
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", page.name], capture_output=True).returncode
    last = subprocess.run([*git, "log", "-1", "--format=%H", "--", page.name], capture_output=True, text=True)
    if changed or not last.stdout.strip():
        raise ValueError(f"{page}: not committed as it is; expected a page that was there before the run. Commit it.")
    return last.stdout.strip()[:12]


def translation(
    folder: Path, data: str, log: Log, stopped: bool, entropy: float, options: list[str], text: str = "", raw: str = "",
    rule: str = "", protocol: str = "",
) -> tuple[Row, str]:  # fmt: skip
    """A model's translations of the test set.

    Args:
        entropy: of a target token, in bits.
        options: fairseq-generate's.
        text, raw: as for `bleu`.
        rule: by which ω was set; empty: the scheme has none.
        protocol: a page that says beforehand what the run is for.
    """
    kind, update = verdict(log, entropy, stopped)
    score, signature = None, None
    if not stopped:
        score, signature = bleu(generate(folder, data, options), Path(text) if text else None, raw)
    row = {
        "verdict": kind,
        "update": update,
        "bits": None if stopped else log.valid[max(log.valid)],
        "left": left_plateau(log.valid, entropy),
        "entropy": entropy,
        "bleu": score,
        "signature": signature,
        **cost(log),
        "train": log.train,
        "valid": log.valid,
        "rule": rule,
        **({"protocol": last_change(Path(protocol))} if protocol else {}),
    }
    where = "" if update is None else f" by update {update}"
    return row, f"{kind}{where}" + ("" if score is None else f", BLEU {score:.2f}")


def classes(folder: Path, data: str, log: Log, stopped: bool) -> tuple[Row, str]:
    """A classifier's accuracies; that of a guess, if it diverged.

    Training tried every checkpoint on validation and the test set; what counts is the last one.
    """
    accuracies = {split: GUESS if stopped else accuracy(folder / "train.log", split) for split in ("valid", "test")}
    message = "diverged" if stopped else f"accuracy {accuracies['test']:.3f}"
    return {"diverged": stopped, **accuracies, **cost(log)}, message


def accuracy(log: Path, subset: str) -> float:
    """The last accuracy on a subset, 0 to 1, in a log of --log-format json. fairseq's per cent have three digits."""
    logged = re.findall(rf'"{subset}_accuracy": "?([0-9.]+)', "\n".join(read_lines(log)))
    return round(float(logged[-1]) / 100, 5)


def cost(log: Log) -> Row:
    return {"params": log.params, "seconds": round(log.hours * 3600)}


JUDGES: dict[str, Callable[..., tuple[Row, str]]] = {"translation": translation, "classes": classes}
"""From a run's folder, its text, its log, and whether it stopped itself, diverged, to its row and what to say."""
