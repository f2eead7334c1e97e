"""The last steps of a GPU trial: Admin, Pre-LN and Post-LN on a real corpus, same settings, same time."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from recipes.compare.result import bleu
from recipes.gpu_trial.steps import LIMIT, Rows, Scale, Step, model_options
from recipes.steps.checkpoints import newest
from recipes.steps.common import read_lines, replacing
from recipes.steps.logs import read_log

METHODS = ("admin", "pre-ln", "post-ln")
# Minutes of training in one step, which leaves some for a validation and a checkpoint.
CHUNK = 6.0
# A share goes on from the last checkpoint of the one before: what came after it is trained again.
SAVE_EVERY = 100


def corpus_folder(folder: Path, data: Path, pair: str) -> Path:
    """Where all is that is of one corpus."""
    return folder / f"{data.name}-{pair}"


def call(command: list[str], log: Path, limit: float = LIMIT) -> None:
    """Run a command, its output at the end of the log.

    Raises:
        ValueError: it failed.
    """
    with log.open("ab") as out:
        status = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=limit).returncode
    if status:
        last = (log.read_text(errors="replace").strip() or "nothing said").splitlines()[-1]
        raise ValueError(f"{command[2]} ended with status {status}: {last} All it said: {log}.")


def prepare(data: Path, pair: str, merges: int, folder: Path) -> Rows:
    """Tokens, units and binary data, as `make own` makes them; killed, it goes on where it was."""
    command = ["make", "-f", "recipes/own/Makefile", f"PYTHON={sys.executable}", f"DATA={data}", f"PAIR={pair}"]
    command += [
        f"RUNS={corpus_folder(folder, data, pair)}",
        "CORPUS=trial",
        "PRESET=cpu",
        f"MERGES={merges}",
        "prepare",
    ]
    call(command, folder / "prepare.log", limit=1e6)
    return [{"pair": pair, "merges": merges}]


def train(scale: Scale, data: Path, method: str, pair: str, until: float, folder: Path) -> Rows:
    """Train until so many minutes in all, from the newest checkpoint."""
    place = corpus_folder(folder, data, pair)
    run = place / method
    run.mkdir(parents=True, exist_ok=True)
    binary = place / "own/trial" / pair / "data/bin"
    layers, precision = (18, "fp16") if scale.gpu else (1, "fp32")
    sizes = replace(scale.base, encoder_layers=layers, decoder_layers=layers, precision=precision)
    tokens = str(scale.tokens[min(1, len(scale.tokens) - 1)])
    source, target = pair.split("-")
    command = [sys.executable, "-m", "recipes.steps.train", str(binary), "-s", source, "-t", target]
    command += [*model_options(scale, method, sizes), "--max-tokens", tokens, "--save-dir", str(run / "checkpoints")]
    command += ["--save-interval-updates", str(SAVE_EVERY), "--keep-interval-updates", "1", "--no-epoch-checkpoints"]
    command += ["--no-last-checkpoints", "--validate-interval-updates", str(SAVE_EVERY)]
    command += ["--stop-time-hours", str(until / 60), "--max-update", "1000000", "--log-format", "json"]
    command += ["--log-interval", "20" if scale.gpu else "2"]
    try:
        call(command, run / "train.log")
    except ValueError as error:
        if "diverged" not in str(error):
            raise
        return [{"method": method, "minutes": until, "diverged": str(error)}]
    log = read_log(run / "train.log", unfinished=True)
    bits = log.valid[max(log.valid)] if log.valid else math.nan
    return [{"method": method, "minutes": until, "updates": log.updates, "bits, valid": round(bits, 3)}]


def translate(scale: Scale, data: Path, method: str, pair: str, folder: Path) -> Rows:
    """BLEU of the test set's tokens, and the curve of the training."""
    place = corpus_folder(folder, data, pair)
    run = place / method
    binary = place / "own/trial" / pair / "data/bin"
    source, target = pair.split("-")
    command = [sys.executable, "-m", "fairseq_cli.generate", str(binary), "--user-dir", "fairseq_admin", "--beam", "4"]
    command += ["-s", source, "-t", target, "--path", str(newest(run / "checkpoints")), "--gen-subset", "test"]
    command += ["--required-batch-size-multiple", "1", "--max-tokens", "4096", "--remove-bpe"]
    command += ["--max-len-a", "1.2", "--max-len-b", "10", *([] if scale.gpu else ["--cpu"])]
    with replacing(run / "generate.txt") as part:
        call(command, part)
    score, signature = bleu(read_lines(run / "generate.txt"))
    log = read_log(run / "train.log", unfinished=True)
    curve = " ".join(f"{updates}:{bits:.2f}" for updates, bits in log.valid.items())
    return [{"method": method, "BLEU": round(score, 2), "bits by update, valid": curve, "signature": signature}]


def check_corpus(data: Path, pair: str) -> None:
    """Before anything is run.

    Raises:
        ValueError: the folder has not all the text.
    """
    if not re.fullmatch(r"[^-]+-[^-]+", pair):
        raise ValueError(f"PAIR={pair} is not a pair; expected source and target language, as in PAIR=de-en.")
    for name in (f"{split}.{language}" for split in ("train", "valid", "test") for language in pair.split("-")):
        if not any((data / it).is_file() for it in (name, f"{name}.gz")):
            raise ValueError(f"{data}: found no {name} or {name}.gz; DATA= is a folder with train, valid and test.")


def corpus_steps(scale: Scale, data: Path, pair: str, minutes: float) -> list[Step]:
    """All methods get a share before any gets the next, so that a trial cut short compares like with like."""
    merges = 10000 if scale.gpu else 200
    corpus = corpus_folder(Path(), data, pair)
    steps = [Step(f"prepare-{corpus}", "A real corpus", partial(prepare, data, pair, merges))]
    shares = max(1, math.ceil(minutes / CHUNK))
    for share in range(1, shares + 1):
        until = min(minutes, share * CHUNK)
        for method in METHODS:
            name = re.sub(r"\.0$", "", f"{until:.1f}")
            train_on = partial(train, scale, data, method, pair, until)
            steps.append(Step(f"train-{corpus}-{method}-{name}", "Training", train_on))
    for method in METHODS:
        translate_with = partial(translate, scale, data, method, pair)
        steps.append(Step(f"bleu-{corpus}-{method}-{minutes:g}", "Translations", translate_with))
    return steps
