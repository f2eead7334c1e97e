"""The last steps of a GPU trial: Admin, Pre-LN and Post-LN on a real corpus, same settings, same time.

A method is trained in shares of a few minutes, a step each. Each goes on from the checkpoint that the one before left
at its end, and a share that was cut short is trained again: the minutes in a row are those of its weights. Another
MINUTES= is another training, in a folder of its own.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from recipes.compare.result import bleu
from recipes.gpu_trial.steps import ENDING_WITH_IT, LIMIT, Rows, Scale, Step, model_options
from recipes.steps.common import read_lines, replacing
from recipes.steps.logs import read_log
from recipes.steps.plugin import DIVERGED
from recipes.steps.table import digest

METHODS = ("admin", "pre-ln", "post-ln")
# Minutes of training in one step, which leaves some for a validation and a checkpoint.
CHUNK = 6.0
# Minutes of training that may be asked for: a week.
LONGEST = 10000.0
VALIDATE_EVERY = 100


@dataclass(frozen=True)
class Training:
    """A method on a corpus, for so many minutes in all."""

    corpus: str
    pair: str
    method: str
    minutes: float

    def step(self, until: float) -> str:
        """What the step is called that trains until so many minutes."""
        return f"train-{self.corpus}-{self.method}-{until:g}of{self.minutes:g}"

    def place(self, folder: Path) -> Path:
        """Where its checkpoints, log and translations are."""
        return folder / self.corpus / f"{self.method}-{self.minutes:g}"

    def data(self, folder: Path) -> list[str]:
        """fairseq's options for what `prepare` made of the corpus."""
        source, target = self.pair.split("-")
        return [str(folder / self.corpus / "own/trial" / self.pair / "data/bin"), "-s", source, "-t", target]


class DivergedError(ValueError):
    """Training stopped itself, because it had diverged."""


def call(command: list[str], log: Path, limit: float = LIMIT) -> None:
    """Run a command, its output at the end of the log.

    Raises:
        DivergedError: it was a training, and diverged.
        ValueError: it failed.
        subprocess.TimeoutExpired: it took longer than the limit, in seconds; it and all that it started are gone.
    """
    with log.open("ab") as out:
        status = subprocess.run(
            [*ENDING_WITH_IT, *command], stdout=out, stderr=subprocess.STDOUT, timeout=limit
        ).returncode
    if status:
        last = (log.read_text(errors="replace").strip() or "nothing said").splitlines()[-1]
        kind = DivergedError if status == DIVERGED else ValueError
        raise kind(f"{command[2]} ended with status {status}: {last} All it said: {log}.")


def texts(data: Path, pair: str) -> list[Path]:
    """The files of a corpus.

    Raises:
        ValueError: the folder has not all the text.
    """
    if not re.fullmatch(r"[^-]+-[^-]+", pair):
        raise ValueError(f"PAIR={pair} is not a pair; expected source and target language, as in PAIR=de-en.")
    found = []
    for name in (f"{split}.{language}" for split in ("train", "valid", "test") for language in pair.split("-")):
        there = [path for path in (data / name, data / f"{name}.gz") if path.is_file()]
        if not there:
            raise ValueError(f"{data}: found no {name} or {name}.gz; DATA= is a folder with train, valid and test.")
        found += there
    return found


def corpus_name(data: Path, pair: str) -> str:
    """What a corpus is called in the names of its steps and its folder.

    After its folder, its languages, and the SHA-256 of its files' names and contents: text that was changed is another
    corpus, and a copy is the same one.
    """
    state = hashlib.sha256()
    for path in texts(data, pair):
        state.update(f"{path.name} {digest(path, 'sha256')}\n".encode())
    return f"{data.name}-{pair}-{state.hexdigest()[:8]}"


def prepare(data: Path, pair: str, corpus: str, merges: int, folder: Path) -> Rows:
    """Tokens, units and binary data, as `make own` makes them; killed, it goes on where it was."""
    command = ["make", "-f", "recipes/own/Makefile", f"PYTHON={sys.executable}", f"DATA={data}", f"PAIR={pair}"]
    command += [f"RUNS={folder / corpus}", "CORPUS=trial", "PRESET=cpu", f"MERGES={merges}", "prepare"]
    call(command, folder / "prepare.log", limit=1e6)
    return [{"pair": pair, "merges": merges}]


def checkpoint(place: Path, minute: float) -> Path | None:
    """What a share of the training left at its end; None where the training has diverged before.

    Raises:
        ValueError: there is none.
    """
    path = place / f"{minute:g}.pt"
    if path.exists():
        return path
    if (place / "diverged").exists():
        return None
    raise ValueError(
        f"{path}: found no checkpoint, so the training did not come to minute {minute:g}. Run the trial again; where "
        "that says the same, remove this training's files in steps/ first."
    )


def train(scale: Scale, training: Training, begin: float, until: float, folder: Path) -> Rows:
    """Train a share: from the end of the one before until so many minutes in all."""
    place = training.place(folder)
    place.mkdir(parents=True, exist_ok=True)
    row = {"method": training.method, "minutes": until}
    start = checkpoint(place, begin) if begin else None
    if begin and not start:
        return [{**row, "diverged": "before"}]
    work, diverged = place / "checkpoints", place / "diverged"
    # Of earlier shares, and of a share that was cut short or is now done again.
    shutil.rmtree(work, ignore_errors=True)
    for left in (*place.glob("*.pt"), diverged):
        if left != start:
            left.unlink(missing_ok=True)
    layers, precision = (18, "fp16") if scale.gpu else (1, "fp32")
    sizes = replace(scale.base, encoder_layers=layers, decoder_layers=layers, precision=precision)
    tokens = str(scale.tokens[min(1, len(scale.tokens) - 1)])
    command = [sys.executable, "-m", "recipes.steps.train", *training.data(folder), "--max-tokens", tokens]
    command += [*model_options(scale, training.method, sizes), "--save-dir", str(work)]
    command += ["--restore-file", str(start)] if start else []
    # fairseq writes checkpoint_last.pt where --stop-time-hours ends it, after a validation.
    command += ["--no-epoch-checkpoints", "--save-interval", "1000000", "--max-update", "1000000"]
    command += ["--stop-time-hours", str(until / 60), "--validate-interval-updates", str(VALIDATE_EVERY)]
    command += ["--log-format", "json", "--log-interval", "20" if scale.gpu else "2"]
    try:
        call(command, place / "train.log")
    except DivergedError as error:
        diverged.touch()
        return [{**row, "diverged": str(error)}]
    log = read_log(place / "train.log", unfinished=True)
    bits = log.valid[max(log.valid)] if log.valid else math.nan
    os.replace(work / "checkpoint_last.pt", place / f"{until:g}.pt")
    shutil.rmtree(work)
    return [{**row, "updates": log.updates, "bits, valid": round(bits, 3)}]


def translate(scale: Scale, training: Training, folder: Path) -> Rows:
    """BLEU of the test set's tokens at the end of the training, and the training's curve."""
    place = training.place(folder)
    row = {"method": training.method, "minutes": training.minutes}
    path = checkpoint(place, training.minutes)
    if not path:
        return [{**row, "BLEU": "diverged"}]
    command = [sys.executable, "-m", "fairseq_cli.generate", *training.data(folder), "--user-dir", "fairseq_admin"]
    command += ["--path", str(path), "--gen-subset", "test", "--beam", "4"]
    command += ["--required-batch-size-multiple", "1", "--max-tokens", "4096", "--remove-bpe"]
    command += ["--max-len-a", "1.2", "--max-len-b", "10", *([] if scale.gpu else ["--cpu"])]
    with replacing(place / "generate.txt") as part:
        call(command, part)
    score, signature = bleu(read_lines(place / "generate.txt"))
    log = read_log(place / "train.log", unfinished=True)
    curve = " ".join(f"{updates}:{bits:.2f}" for updates, bits in log.valid.items())
    return [{**row, "BLEU": round(score, 2), "bits by update, valid": curve, "signature": signature}]


def corpus_steps(scale: Scale, data: Path, pair: str, minutes: float) -> list[Step]:
    """All methods get a share before any gets the next, so that a trial cut short compares like with like.

    Raises:
        ValueError: the corpus is not whole, or there is no such time.
    """
    if not 0 < minutes <= LONGEST:
        raise ValueError(f"MINUTES={minutes:g} is not a time to train; expected more than 0, at most {LONGEST:g}.")
    merges = 10000 if scale.gpu else 200
    corpus = corpus_name(data, pair)
    prepared = Step(f"prepare-{corpus}", "A real corpus", partial(prepare, data, pair, corpus, merges))
    steps = [prepared]
    trainings = [Training(corpus, pair, method, minutes) for method in METHODS]
    ends = [0.0, *(share * CHUNK for share in range(1, math.ceil(minutes / CHUNK))), minutes]
    for begin, until in zip(ends, ends[1:]):
        for training in trainings:
            before = training.step(begin) if begin else prepared.name
            train_on = partial(train, scale, training, begin, until)
            steps.append(Step(training.step(until), "Training", train_on, before))
    for training in trainings:
        name = f"bleu-{corpus}-{training.method}-{minutes:g}"
        translate_with = partial(translate, scale, training)
        steps.append(Step(name, "Translations", translate_with, training.step(minutes)))
    return steps
