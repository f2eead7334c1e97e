"""How one run of a grid came out: its translations of the test set and their score, or a classifier's accuracy."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sacrebleu.metrics import BLEU

from fairseq_admin.text.tokens import Text
from recipes.compare.outcome import left_plateau, verdict
from recipes.steps import languages
from recipes.steps.checkpoints import newest
from recipes.steps.common import read_lines, replacing
from recipes.steps.logs import read_log
from recipes.steps.score import hypotheses

TARGET = re.compile(r"T-(\d+)\t(.*)")
GUESS = 0.5


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


def generate(folder: Path, data: str, options: list[str]) -> None:
    """Run fairseq-generate with the run's last checkpoint; its whole output, or no file."""
    path = newest(folder / "checkpoints")
    command = [sys.executable, "-m", "fairseq_cli.generate", data, "--user-dir", "fairseq_admin"]
    command += ["--path", str(path), "--gen-subset", "test", "--required-batch-size-multiple", "1", *options]
    with replacing(folder / "generate.txt") as part:
        with part.open("wb") as out:
            status = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT).returncode
        if status:
            output = part.read_bytes().decode("utf-8", "replace").strip()
            raise ValueError(f"{folder}: fairseq-generate ended with status {status}: {output.splitlines()[-1]}")


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


def translation(
    folder: Path,
    data: str,
    stopped: bool,
    entropy: float,
    options: list[str],
    text: str = "",
    raw: str = "",
    protocol: str = "",
) -> tuple[dict[str, Any], str]:
    """Translate the test set with a run's last checkpoint: its row, and what to say.

    Args:
        entropy: of a target token, in bits.
        options: fairseq-generate's.
        text: text.json of a text that was tokenised; the score is then of the detokenised translations against that
            text as it was published, else of the tokens.
        raw: prefix of that text's raw test set.
        protocol: a page that says beforehand what the run is for.
    """
    log = read_log(folder / "train.log", unfinished=stopped)
    found = verdict(log, entropy, stopped)
    score, signature = None, None
    if not stopped:
        if not (folder / "generate.txt").exists():
            generate(folder, data, options)
        lines = read_lines(folder / "generate.txt")
        if text:
            tokens = Text.read(Path(text))
            score, signature = published_bleu(lines, tokens, read_lines(f"{raw}.{tokens.target}"))
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
        **({"protocol": last_change(Path(protocol))} if protocol else {}),
    }
    where = "" if found.update is None else f" by update {found.update}"
    scored = "" if score is None else f", BLEU {score:.2f}"
    return row, f"{found.kind}{where}{scored}"


def classes(folder: Path, data: str, stopped: bool) -> tuple[dict[str, Any], str]:
    """A classifier's row, and what to say. A run that diverged has the accuracy of a guess.

    Training tried every checkpoint on validation and the test set; what counts is the last one.
    """
    log = folder / "train.log"
    parsed = read_log(log, unfinished=stopped)
    found = {subset: GUESS if stopped else accuracy(log, subset) for subset in ("valid", "test")}
    row = {"diverged": stopped, **found, "params": parsed.params, "seconds": round(parsed.hours * 3600)}
    return row, "diverged" if stopped else f"accuracy {found['test']:.3f}"


def accuracy(log: Path, subset: str) -> float:
    """The last accuracy on a subset, 0 to 1, in a log of --log-format json.

    Raises:
        ValueError: there is none.
    """
    found = re.findall(rf'"{subset}_accuracy": "?([0-9.]+)', "\n".join(read_lines(log)))
    if not found:
        raise ValueError(
            f"{log}: has no accuracy on {subset}; expected one a checkpoint. Remove its folder, run again."
        )
    return round(float(found[-1]) / 100, 5)  # fairseq's per cent have three digits


JUDGES: dict[str, Callable[..., tuple[dict[str, Any], str]]] = {"translation": translation, "classes": classes}
"""From a run's folder, its data, and whether it stopped itself, to its row and what to say."""
