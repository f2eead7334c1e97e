"""The steps of a GPU trial, each of at most eight minutes: what to run, and what to write down."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from recipes.gpu_trial.sample import write_sample
from recipes.preflight.updates import intervals, run_updates, seconds

LIMIT = 480.0
"""Seconds that a step may take."""
ENDING_WITH_IT = (sys.executable, "-m", "recipes.steps.guard", "--")
"""Before a command: all that it starts ends with it, also when its time is up, and leaves the GPU to the next step."""
STOCK = "post-ln-stock"
"""fairseq's own model, without the plugin."""
SCALED = "--fp16-scale-window 256 --threshold-loss-scale 0.03125"
PRECISIONS = {
    "fp16": f"--fp16 --fp16-no-flatten-grads {SCALED}",
    "me-fp16": f"--memory-efficient-fp16 {SCALED}",
    "amp": "--amp",
    "bf16": "--bf16 --fp16-no-flatten-grads",
    "fp32": "",
}
"""fairseq's options, as in recipes/precision.mk."""


@dataclass(frozen=True)
class Sizes:
    """A model's, and how it trains."""

    encoder_layers: int = 6
    decoder_layers: int = 6
    width: int = 512
    ffn: int = 2048
    heads: int = 8
    words: int = 32768
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    precision: str = "fp16"


@dataclass(frozen=True)
class Scale:
    """How large the trial is: a GPU's, or one to try the trial itself on a CPU."""

    device: str
    layers: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]
    precisions: tuple[str, ...]
    base: Sizes
    updates: int
    tests: tuple[str, ...]
    dtypes: tuple[str, ...]
    memory: float | None = None

    @property
    def gpu(self) -> bool:
        return self.device == "cuda"


ON_GPU = Scale(
    "cuda", ((6, 6), (18, 18), (60, 12)), (4096, 8192, 16384), tuple(PRECISIONS),
    Sizes(attention_dropout=0.1, activation_dropout=0.1), 12, ("-m", "cuda", "tests"),
    ("float16", "bfloat16"),
)  # fmt: skip
ON_CPU = Scale(
    "cpu", ((1, 1), (2, 1)), (256, 512), ("fp32", "bf16"),
    Sizes(width=16, ffn=32, heads=2, words=100), 6, ("tests/test_omega.py",),
    ("float32",),
)  # fmt: skip

ENDS = {"failed": "failure", "broken": "error", "skipped": "skipped"}
"""How a test may end other than well, and pytest's name for it in its XML."""

TOLD = (
    "method", "dtype", "tokens", "step_ms", "ratio", "ratio_low", "ratio_high", "operations", "waits", "peak_mib",
    "optimizer_ms", "loss_ms", "profile_forwards", "profile_steps",
)  # fmt: skip
"""Which of the bench's columns the report has."""

Rows = list[dict]


@dataclass(frozen=True)
class Step:
    """A name, and what it does in a folder: rows for the report, or a ValueError that says what is missing.

    `before` is the name of the step that it goes on from, if any: after that one it is done again.
    """

    name: str
    title: str
    do: Callable[[Path], Rows]
    before: str = ""


def model_options(scale: Scale, method: str, sizes: Sizes) -> list[str]:
    """fairseq's options for such a model, trained as the papers' recipes train."""
    arch = "transformer" if method == STOCK else "transformer_admin"
    text = f"--user-dir fairseq_admin --arch {arch} --share-all-embeddings --dropout {sizes.dropout}"
    text += "" if method == STOCK else f" --admin-scheme {method}"
    text += f" --attention-dropout {sizes.attention_dropout} --activation-dropout {sizes.activation_dropout}"
    for side, layers in (("encoder", sizes.encoder_layers), ("decoder", sizes.decoder_layers)):
        text += f" --{side}-layers {layers} --{side}-embed-dim {sizes.width} --{side}-ffn-embed-dim {sizes.ffn}"
        text += f" --{side}-attention-heads {sizes.heads}"
    text += " --optimizer radam --lr 0.0005 --lr-scheduler inverse_sqrt --warmup-updates 4000 --warmup-init-lr 1e-7"
    text += " --criterion label_smoothed_cross_entropy --label-smoothing 0.1 --required-batch-size-multiple 1 --seed 1"
    text += f" {PRECISIONS[sizes.precision]} --distributed-world-size 1 --num-workers 0"
    return text.split() + (["--adam-betas", "(0.9, 0.98)"] + ([] if scale.gpu else ["--cpu"]))


def run_tests(scale: Scale, folder: Path) -> Rows:
    """How many tests passed, failed and were skipped, and why."""
    result = folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", *scale.tests, "-p", "no:cacheprovider", f"--junitxml={result}"]
    done = subprocess.run([*ENDING_WITH_IT, *command], capture_output=True, text=True, timeout=LIMIT)
    (folder / "tests.log").write_text(done.stdout + done.stderr)
    if not result.exists():
        raise ValueError(
            f"pytest ended with status {done.returncode} and no result; all it said: {folder / 'tests.log'}"
        )
    cases = list(ElementTree.parse(result).getroot().iter("testcase"))
    ends = {kind: [case for case in cases if case.find(tag) is not None] for kind, tag in ENDS.items()}
    skips = sorted({skip.get("message", "") for skip in ElementTree.parse(result).getroot().iter("skipped")})
    row = {"tests": len(cases), **{kind: len(found) for kind, found in ends.items()}}
    names = ", ".join(f"{case.get('classname')}.{case.get('name')}" for case in ends["failed"] + ends["broken"])
    return [{**row, "which": names, "skipped because": "; ".join(skips)}]


def measure_sizes(scale: Scale, layers: tuple[int, int], precision: str, folder: Path) -> Rows:
    """Step time of the plugin's and of fairseq's own Post-LN, and on a GPU its peak memory."""
    rows, length = [], 64
    for tokens in scale.tokens:
        sizes = replace(scale.base, encoder_layers=layers[0], decoder_layers=layers[1], precision=precision)
        row = {"layers": f"{layers[0]}L-{layers[1]}L", "precision": precision, "tokens": tokens}
        for name, method in (("plugin", "admin"), ("stock", STOCK)):
            options = [*model_options(scale, method, sizes), "--max-tokens", str(tokens)]
            with tempfile.TemporaryDirectory(dir=folder) as work:
                write_sample(Path(work), ("a", "b"), (30, 30), length, sizes.words, tokens * (scale.updates + 2))
                try:
                    found = run_updates(options, Path(work), Path(work), scale.updates, LIMIT / 8)
                except ValueError as error:
                    row |= {f"{name} ms": str(error)}
                    continue
            row[f"{name} ms"] = round(1000 * seconds(found), 1)
            if scale.memory:
                free = min(float(it["gb_free"]) for it in found)
                row[f"{name} GB"] = round((scale.memory - free * 2**30) / 1e9, 3)
        rows.append(row)
    return rows


def step_cost(scale: Scale, dtype: str, tokens: int, folder: Path, limit: float = LIMIT) -> Rows:
    """Stock, plain and fast in turns: time, what is asked of the device, memory, and what profiling costs.

    One size a step: a size that takes too much memory or time costs the others nothing.
    """
    encoder, decoder = scale.layers[1]
    size = f"{encoder}-{decoder}:{scale.base.width}:{tokens}"
    found = folder / f"bench-{dtype}-{tokens}.json"
    command = [sys.executable, "recipes/bench/speed.py", "--sizes", size, "--device", scale.device, "--dtype", dtype]
    command += ["--pairs", "15" if scale.gpu else "2", "--json", str(found)]
    done = subprocess.run([*ENDING_WITH_IT, *command], capture_output=True, text=True, timeout=limit)
    if done.returncode:
        raise ValueError(f"recipes/bench/speed.py ended with status {done.returncode}: {done.stderr.strip()[-300:]}")
    rows = json.loads(found.read_text(encoding="utf-8"))["rows"]
    return [{name: round(row[name], 3) if isinstance(row[name], float) else row[name] for name in TOLD} for row in rows]


def resume(scale: Scale, folder: Path) -> Rows:
    """Train, be killed, go on from the newest checkpoint: is the end that of a run without a kill?"""
    precision = "fp16" if scale.gpu else "fp32"
    sizes = replace(scale.base, encoder_layers=2, decoder_layers=2, precision=precision, dropout=0.1)
    work = folder / "resume"
    shutil.rmtree(work, ignore_errors=True)  # of a trial that was killed here
    work.mkdir(parents=True)
    write_sample(work, ("a", "b"), (12, 12), 24, sizes.words, scale.tokens[0] * 16)
    losses = {}
    for name in ("whole", "killed"):
        options = [*model_options(scale, "admin", sizes), "--max-tokens", str(scale.tokens[0]), "--max-update", "12"]
        options += "--disable-validation --save-interval-updates 4 --log-format json --log-interval 1".split()
        command = [sys.executable, "-m", "recipes.steps.train", str(work), *options, "--save-dir", str(work / name)]
        if name == "killed":
            victim = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            assert victim.stdout is not None
            for line in victim.stdout:
                if '"num_updates": "6"' in line:
                    victim.send_signal(signal.SIGKILL)
            victim.wait()
        done = subprocess.run([*ENDING_WITH_IT, *command], capture_output=True, text=True, timeout=LIMIT)
        if done.returncode:
            raise ValueError(f"training ended with status {done.returncode}: {(done.stdout + done.stderr)[-300:]}")
        updates = intervals([(0.0, line) for line in (done.stdout + done.stderr).splitlines()])
        if not updates:
            raise ValueError("the kill came after the last update, so nothing was left to train. Run the trial again.")
        losses[name] = float(updates[-1]["loss"])
        first = int(updates[0]["num_updates"])
    return [{"loss, whole": losses["whole"], "loss, killed": losses["killed"], "went on at update": first}]


def all_steps(scale: Scale) -> list[Step]:
    """In the order of what is learnt first."""
    steps = [Step("tests", "The CUDA tests" if scale.gpu else "Tests", partial(run_tests, scale))]
    for layers in scale.layers:
        for precision in scale.precisions:
            name = f"{layers[0]}l-{layers[1]}l-{precision}"
            steps.append(Step(name, "Step time and peak memory", partial(measure_sizes, scale, layers, precision)))
    for dtype in scale.dtypes:
        for tokens in scale.tokens:
            cost = partial(step_cost, scale, dtype, tokens)
            steps.append(Step(f"bench-{dtype}-{tokens}", "A step of stock, plain and fast, in turns", cost))
    steps.append(Step("resume", "Killed and gone on", partial(resume, scale)))
    return steps
