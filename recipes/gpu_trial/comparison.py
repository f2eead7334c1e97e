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
from recipes.steps.common import read_lines, replacing
from recipes.steps.logs import read_log

METHODS = ("admin", "pre-ln", "post-ln")
# Minutes of training in one step, which leaves some for a validation and a checkpoint.
CHUNK = 6.0


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
    command += [f"RUNS={folder / 'runs'}", "CORPUS=trial", "PRESET=cpu", f"MERGES={merges}", "prepare"]
    call(command, folder / "prepare.log", limit=1e6)
    return [{"pair": pair, "merges": merges}]


def train(scale: Scale, method: str, pair: str, until: float, folder: Path) -> Rows:
    """Train until so many minutes in all, from the newest checkpoint."""
    run = folder / "runs" / method
    run.mkdir(parents=True, exist_ok=True)
    binary = folder / "runs/own/trial" / pair / "data/bin"
    layers, precision = (18, "fp16") if scale.gpu else (1, "fp32")
    sizes = replace(scale.base, encoder_layers=layers, decoder_layers=layers, precision=precision)
    tokens = str(scale.tokens[min(1, len(scale.tokens) - 1)])
    source, target = pair.split("-")
    # fairseq copies checkpoint_last.pt in place, where a kill may cut it short: the newest numbered one is whole.
    saved = sorted(run.glob("checkpoints/checkpoint_*_*.pt"), key=lambda path: int(path.stem.rpartition("_")[2]))
    command = [sys.executable, "-m", "fairseq_cli.train", str(binary), "-s", source, "-t", target]
    command += [*model_options(scale, method, sizes), "--max-tokens", tokens, "--save-dir", str(run / "checkpoints")]
    command += ["--restore-file", str(saved[-1]) if saved else "none", "--save-interval-updates", "500"]
    command += ["--keep-interval-updates", "1", "--validate-interval-updates", "500", "--no-epoch-checkpoints"]
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


def translate(scale: Scale, method: str, pair: str, folder: Path) -> Rows:
    """BLEU of the test set's tokens, and the curve of the training."""
    run = folder / "runs" / method
    binary = folder / "runs/own/trial" / pair / "data/bin"
    source, target = pair.split("-")
    command = [sys.executable, "-m", "fairseq_cli.generate", str(binary), "--user-dir", "fairseq_admin", "--beam", "4"]
    command += [
        "-s",
        source,
        "-t",
        target,
        "--path",
        str(run / "checkpoints/checkpoint_last.pt"),
        "--gen-subset",
        "test",
    ]
    command += ["--required-batch-size-multiple", "1", "--max-tokens", "4096", "--remove-bpe"]
    command += ["--max-len-a", "1.2", "--max-len-b", "10", *([] if scale.gpu else ["--cpu"])]
    with replacing(run / "generate.txt") as part:
        call(command, part)
    score, signature = bleu(read_lines(run / "generate.txt"))
    log = read_log(run / "train.log", unfinished=True)
    curve = " ".join(f"{updates}:{bits:.2f}" for updates, bits in log.valid.items())
    return [{"method": method, "BLEU": round(score, 2), "bits by update, valid": curve, "signature": signature}]


def corpus_steps(scale: Scale, data: Path, pair: str, minutes: float) -> list[Step]:
    """All methods get a share before any gets the next, so that a trial cut short compares like with like."""
    merges = 10000 if scale.gpu else 200
    steps = [Step("prepare", "A real corpus", partial(prepare, data, pair, merges))]
    shares = max(1, math.ceil(minutes / CHUNK))
    for share in range(1, shares + 1):
        until = min(minutes, share * CHUNK)
        for method in METHODS:
            name = re.sub(r"\.0$", "", f"{until:.1f}")
            steps.append(Step(f"train-{method}-{name}", "Training", partial(train, scale, method, pair, until)))
    for method in METHODS:
        steps.append(Step(f"bleu-{method}-{minutes:g}", "Translations", partial(translate, scale, method, pair)))
    return steps
