"""Time a few real updates of a run: its own model and options, on its own data or random units of the same lengths."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from recipes.preflight.batches import batches
from recipes.preflight.sample import write_sample
from recipes.steps.activations import Batch
from recipes.steps.common import read_lines
from recipes.steps.logs import stats

# The first updates profile, allocate and compile, and are not timed.
WARM_UP = 3
# On a CPU a model meant for GPUs takes a batch of so many tokens, and one of more parameters than LARGE of fewer: an
# update of the first size takes minutes.
CPU_TOKENS, FEW_TOKENS = 1024, 256
LARGE = 2e8
FOR_GPUS = ("--fp16", "--memory-efficient-fp16", "--amp", "--bf16", "--fp16-no-flatten-grads")
FOR_GPUS_WITH_VALUE = (
    "--fp16-scale-window",
    "--threshold-loss-scale",
    "--distributed-init-method",
    "--distributed-rank",
)


@dataclass(frozen=True)
class Corpus:
    """What there is to train on: of each language the mean units of a sentence, and pairs; and pairs to validate on."""

    pair: tuple[str, str]
    pairs: int
    units: tuple[float, float]
    longest: int
    words: int
    valid: int = 0


@dataclass(frozen=True)
class Measured:
    """Of an update: seconds, target tokens, and those it may hold with padding; the peak's bytes; seconds to start; the
    batches there were to choose from."""

    updates: int
    seconds: float
    tokens: float
    batch: int
    memory: float
    start: float = 0.0
    batches: frozenset[Batch] = frozenset()


def option(options: list[str], name: str, default: str = "") -> str:
    """The value of fairseq's option, the last if it comes twice."""
    places = [place for place, word in enumerate(options[:-1]) if word == name]
    return options[places[-1] + 1] if places else default


def on_cpu(options: list[str], parameters: int) -> list[str]:
    """The options for the same model on this CPU, with a small batch."""
    kept, skip = [], False
    for word in options:
        if not skip and word not in FOR_GPUS and word not in FOR_GPUS_WITH_VALUE:
            kept.append(word)
        skip = word in FOR_GPUS_WITH_VALUE
    few = FEW_TOKENS if parameters > LARGE else CPU_TOKENS
    tokens = min(few, int(option(options, "--max-tokens", str(few))))
    kept += ["--cpu", "--num-workers", "0", "--distributed-world-size", "1"]
    return [*kept, "--max-tokens", str(tokens), "--update-freq", "1"]


def timed_lines(command: list[str], limit: float) -> tuple[int, list[tuple[float, str]]]:
    """A command's exit status, and its lines with when they came. (fairseq's own times are whole seconds.)

    Args:
        limit: seconds after which it is killed, with the processes it started.
    """
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    clock = threading.Timer(limit, os.killpg, (process.pid, signal.SIGKILL))
    clock.start()
    try:
        assert process.stdout is not None
        lines = [(time.monotonic(), line.rstrip("\n")) for line in process.stdout]
        return process.wait(), lines
    finally:
        clock.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def read(lines: list[tuple[float, str]]) -> list[dict]:
    """fairseq's intervals of one update each, with the time at which each was told."""
    found = [(when, stats(line)) for when, line in lines]
    return [{**told[1], "at": when} for when, told in found if told and told[0] == "train_inner"]


def held(options: list[str]) -> int:
    """Tokens that an update may hold."""
    names = ("--max-tokens", "--update-freq", "--distributed-world-size")
    max_tokens, update_freq, world = (int(option(options, name, "1")) for name in names)
    return max_tokens * update_freq * world


def summarise(intervals: list[dict], batch: int, growth: float, total: float | None, began: float = 0.0) -> Measured:
    """Seconds an update by the clock, warm-up left out where enough updates follow; of a single one fairseq's own time.

    Args:
        batch: tokens that an update may hold.
        total: bytes of a GPU, whose peak fairseq logs as what was left free.
        began: when the command was started. What the first update took longer than the others counts as the start.
    """
    first = min(WARM_UP, max(0, len(intervals) - 2))
    timed = intervals[first:]
    if len(timed) > 1:
        seconds = (timed[-1]["at"] - timed[0]["at"]) / (len(timed) - 1)
    else:
        seconds = max(float(timed[0]["train_wall"]), 0.5)
    free = [float(interval["gb_free"]) * 2**30 for interval in intervals if "gb_free" in interval]
    return Measured(
        updates=len(intervals),
        seconds=seconds,
        tokens=sum(float(interval["wpb"]) for interval in timed) / len(timed),
        batch=batch,
        memory=total - min(free) if total and free else growth,
        start=max(0.0, timed[0]["at"] - began - (first + 1) * seconds),
    )


def measure(
    options: list[str],
    corpus: Corpus,
    data: Path | None,
    folder: Path,
    *,
    updates: int,
    seconds: float,
    total: float | None,
) -> Measured | str:
    """Run so many updates, in about so many seconds at most.

    Args:
        options: fairseq-train's, but for the data and how long to train.
        data: the run's own binary data, if it is prepared.
        folder: where a temporary folder may be.
        total: bytes of a GPU, if the run is on one.

    Returns:
        What was measured, or why nothing could be.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".preflight-") as name:
        work = Path(name)
        if data is None:
            tokens = held(options) * (updates + 2)
            longest = min(corpus.longest, int(option(options, "--max-tokens", str(corpus.longest))))
            write_sample(work, corpus.pair, corpus.units, longest, corpus.words, tokens)
        command = [
            sys.executable,
            "-m",
            "recipes.preflight.weigh",
            str(work / "weight.json"),
            str(data or work),
            *options,
        ]
        command += ["--max-update", str(updates), "--stop-time-hours", str(seconds / 3600), "--no-save"]
        command += ["--disable-validation", "--save-dir", str(work / "checkpoints"), "--log-format", "json"]
        command += ["--log-interval", "1"]
        began = time.monotonic()
        status, lines = timed_lines(command, 3 * seconds + 60)
        intervals = read(lines)
        if not intervals:
            said = next((line for _, line in reversed(lines) if line.strip()), "nothing said")
            took = f"no update in {time.monotonic() - began:.0f} s"
            return took if status < 0 else f"training ended with status {status}: {said}"
        weight = work / "weight.json"
        growth = json.loads(read_lines(weight)[0])["growth"] if weight.exists() else 0
        measured = summarise(intervals, held(options), growth, total, began)
        length = int(option(options, "--tokens-per-sample", str(corpus.longest)))
        found = batches(data or work, corpus.pair, int(option(options, "--max-tokens")), length)
        return replace(measured, batches=frozenset(found))
