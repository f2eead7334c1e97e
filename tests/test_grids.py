"""The grids: their runs, and small ones run from the shell."""

from __future__ import annotations

import csv
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, front
from test_compare import result

from recipes import options as opts
from recipes.research.grid import of
from recipes.research.runs import improved
from recipes.steps.common import write_lines
from recipes.steps.guard import locked
from recipes.steps.results import write_runs

TINY = ["PAIRS=300", "VALID_PAIRS=50", "TEST_PAIRS=20", "WORDS=20", "UPDATES=20"]
SMALL = "--encoder-embed-dim 16 --decoder-embed-dim 16 --encoder-ffn-embed-dim 16 --decoder-ffn-embed-dim 16 "
SMALL += "--save-interval-updates 10 --validate-interval-updates 10 --log-interval 5"
TINY_MODEL, WARMUP = f"ARGS={SMALL}", f"ARGS={SMALL} --warmup-updates 5"
CHANGED = "embed-dim16-ffn-embed-dim16"
"""What TINY_MODEL adds to a grid's name."""


def planned(target: str, folder: Path, *words: str) -> list[str]:
    """The plan's line for each run, relative to the folder, in order."""
    lines = of(target, dict(word.split("=", 1) for word in (f"RUNS={folder}", *words))).lines("all")
    assert not list(folder.iterdir())
    return [line.removeprefix(f"run   {folder}/") for line in lines]


def command(target: str, folder: Path, place: int = 0, **given: str) -> dict[str, str]:
    """fairseq-train's options for a run. The last value of each option counts."""
    grid = of(target, {"RUNS": str(folder), **given})
    return opts.parse(shlex.join(grid.run(list(grid.points())[place]).train_words()[5:]))


def test_the_other_seeds_run_at_the_best_rate(tmp_path):
    """With SEARCH=first, rates are tried on the first seed. The other seeds' runs depend on its results."""
    grid = of("compare", {"SEARCH": "first", "SCHEMES": "admin", "RUNS": str(tmp_path)})
    tried = next(grid.stages())
    assert [axes["seed"] for axes in tried] == ["1"] * 4
    assert len(grid.lines("all")) == 5 and grid.lines("all")[4] == "then the best of those, as the results will show"
    for axes, bits in zip(tried, (3.0, 1.0, 2.0, 4.0)):
        write_runs(grid.result(axes), [result(**axes, bits=bits)])
    *_, last = grid.stages()
    assert [grid.name(axes) for axes in last] == ["admin-18l-lr3e-4-s2", "admin-18l-lr3e-4-s3"]


@pytest.mark.parametrize(
    ("target", "given", "first", "count"),
    [
        ("compare", "DEPTHS=6|ARGS=--admin-ffn-init stock --dropout 0.1 --max-tokens 9 --save-interval-updates 50",
         "compare-dropout0.1-max-tokens9-admin-ffn-initstock/admin-6l-lr1e-4-s1", 228),
        ("compare", "PRESET=multi30k|SEARCH=every|SCHEMES=admin|DEPTHS=60-12|INIT=constant|RATES=1e-3|SEEDS=1",
         "compare-constant-multi30k/admin-60-12l-lr1e-3-s1", 1),
        ("sensitivity", "PRESET=gpu", "sensitivity-gpu/post-ln-lr1e-4-b0.99-s1", 45),
        ("warmup", "", "warmup/post-ln-adam-w0-lr5e-4-s1", 54),
        ("warmup", "PRESET=quick", "warmup-quick/post-ln-adam-w0-lr1e-3-s1", 12),
    ],
)  # fmt: skip
def test_where_the_runs_of_a_grid_are(target, given, first, count, tmp_path):
    runs = planned(target, tmp_path, *filter(None, given.split("|")))
    assert (runs[0], len(runs)) == (first, count)


WRONG = [
    ("RATES=1e-3 nan", "RATES=1e-3 nan is invalid: expected numbers of 0 or more, as 1e-3, one or more"),
    ("RATES=1 1", "RATES=1 1 is invalid: expected one or more, with spaces between and none twice ("),
    ("PATIENCE=50", "PATIENCE=50 is not a multiple of --save-interval-updates 100"),
    ("ARGS=--save-interval-updates 90", "UPDATES=1500 is not a multiple of --save-interval-updates 90"),
    ("ARGS=--adam-eps 1e-6 --lr=1e-4", "--lr in ARGS: compare sets it. Leave it out, or give its setting."),
    ("ARGS=--admin-init log", "--admin-init in ARGS: compare sets it."),
    ("PRESET=tpu", "PRESET=tpu is unknown; expected cpu or gpu or multi30k."),
]


@pytest.mark.parametrize(("word", "message"), WRONG)
def test_what_cannot_be_is_named(word, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        of("compare", {"RUNS": str(tmp_path), **dict([word.split("=", 1)])})
    with pytest.raises(ValueError, match="BETA2S=1 is invalid: expected numbers below 1, as 0.98"):
        of("sensitivity", {"BETA2S": "1"})


PROTOCOL = {
    **{"--encoder-layers": "18", "--decoder-layers": "18", "--encoder-embed-dim": "128", "--decoder-embed-dim": "128"},
    **{"--encoder-ffn-embed-dim": "256", "--encoder-attention-heads": "4", "--dropout": "0.1", "--max-tokens": "1024"},
    **{"--optimizer": "radam", "--adam-betas": "'(0.9, 0.98)'", "--lr": "1e-3", "--lr-scheduler": "inverse_sqrt"},
    **{"--warmup-updates": "400", "--warmup-init-lr": "1e-7", "--clip-norm": "1", "--weight-decay": "0"},
    **{"--criterion": "label_smoothed_cross_entropy_fast", "--label-smoothing": "0.1", "--max-update": "8000"},
    **{"--save-interval-updates": "250", "--keep-interval-updates": "1", "--admin-ffn-init": "xavier", "--seed": "4"},
}


@pytest.mark.parametrize(
    ("given", "more"),
    [
        ({}, {"--admin-scheme": "admin", "--admin-init": "reference"}),
        ({"INIT": "constant"}, {"--admin-scheme": "admin", "--admin-init": "constant"}),
        ({"SCHEMES": "pre-ln", "INIT": "constant"}, {"--admin-scheme": "pre-ln"}),
        ({"SCHEMES": "deepnorm", "ARGS": "--admin-ffn-init stock"}, {"--admin-scheme": "deepnorm"}),
        ({"DEPTHS": "60-12", "ARGS": "--encoder-embed-dim 64"},
         {"--encoder-layers": "60", "--decoder-layers": "12", "--encoder-embed-dim": "64",
          "--admin-init": "reference"}),
    ],
)  # fmt: skip
def test_a_run_of_the_protocol(given, more, tmp_path):
    """A run follows docs/protocol.md. Only schemes with omega get a rule; schemes with their own weights keep them."""
    axes = {
        "SCHEMES": "admin",
        "RATES": "1e-3",
        "SEEDS": "4",
        "PRESET": "multi30k",
        "PATIENCE": "8000",
        "SEARCH": "every",
    }
    options = command("compare", tmp_path, **axes | given)
    assert options.items() >= (PROTOCOL | more).items(), options
    assert ("--admin-init" in options) == ("--admin-init" in more)


def test_the_interval_of_checkpoints_follows_the_length(tmp_path):
    options = command("sensitivity", tmp_path, PAIRS="20", UPDATES="20")
    assert (options["--max-update"], options["--save-interval-updates"]) == ("20", "20")


def test_the_runs_of_the_other_grids(tmp_path):
    """The other grids: no warm-up, Admin with the paper's rule, a plain schedule, and SGD without Adam's options."""
    options = command("sensitivity", tmp_path, PAIRS="20", SCHEMES="admin")
    assert options["--admin-scheme"] == "admin" and options["--admin-init"] == "reference"
    assert options["--adam-betas"] == "'(0.9, 0.99)'" and options["--warmup-updates"] == "0"
    assert options["--lr-scheduler"] == "polynomial_decay" and "--warmup-init-lr" not in options
    options = command("warmup", tmp_path, place=-1, PAIRS="20")
    assert (options["--optimizer"], options["--lr"], options["--warmup-updates"]) == ("sgd", "1", "400")
    assert options["--total-num-update"] == options["--max-update"] == "2000" and "--adam-betas" not in options


def test_a_text_that_is_not_read_is_refused(tmp_path):
    with pytest.raises(ValueError, match="DATA=docs with PRESET=cpu: the text is generated"):
        command("compare", tmp_path, DATA="docs")


def test_a_run_ends_early_without_a_better_validation():
    valid = {100: 5.0, 200: 4.0, 300: 4.5, 400: 4.1, 500: 3.9, 600: 3.9}
    assert [improved(valid, 200, end) for end in (200, 400, 600)] == [True, False, True]
    assert not improved({200: 4.0, 400: 4.0}, 200, 400)


@pytest.mark.slow
def test_a_grid_of_two_runs(tmp_path):
    """A killed grid resumes, finished runs stay, changed settings are refused, and a diverged run is a row."""
    grid = ["SCHEMES=admin", "DEPTHS=1", "RATES=1e38 1e-3", "SEEDS=1", *TINY, WARMUP, f"RUNS={tmp_path}"]
    out, log = tmp_path / f"compare-{CHANGED}-warmup-updates5", tmp_path / "log"
    learns, diverges = out / "admin-1l-lr1e-3-s1", out / "admin-1l-lr1e38-s1"
    command = [sys.executable, "-m", "recipes", "compare", *grid, "UPDATES=100000"]
    with log.open("wb") as output:
        running = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
    try:
        until = time.monotonic() + 600
        while not list(learns.glob("checkpoints/checkpoint_*_*0.pt")):
            assert running.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
            time.sleep(0.2)
        second = front("compare", *grid, "UPDATES=100000")
        assert second.returncode == 2 and f"{out}: process " in second.stderr and "is at work there" in second.stderr
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    assert (diverges / "result.csv").exists() and not (learns / "result.csv").exists()
    done = front("compare", *grid)
    assert done.returncode == 2 and done.stderr.startswith(f"{diverges} was made by another recipe (")
    assert "updates 100000 -> 20" in done.stderr and done.stderr.count("\n") == 1
    shutil.rmtree(diverges)
    (learns / "recipe.json").unlink()
    kept = max(int(path.stem.rpartition("_")[2]) for path in learns.glob("checkpoints/checkpoint_*_*0.pt"))
    grid += [f"UPDATES={kept + 20}", f"PATIENCE={kept + 20}", "JOBS=2"]
    done = front("compare", *grid)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"Loaded checkpoint {learns}/checkpoints/" in (learns / "train.log").read_text()
    diverged, whole = csv.DictReader((out / "runs.csv").open())
    assert whole["verdict"] in ("learned", "plateau") and 0 < float(whole["bits"]) < 20 and whole["signature"]
    assert diverged["verdict"] == "diverged" and not diverged["bleu"]
    assert "| Admin " in done.stdout and (out / "rates.png").exists()
    assert "2 runs, 0 of them done; 2 at a time\n" in done.stdout and "; 2 of 2 runs done\n" in done.stdout
    assert not list(out.rglob("*.part")) and not list(out.rglob("*.pt"))
    stamp = (learns / "result.csv").stat().st_mtime_ns
    for rates in ("1e38 1e-3", "1e-3"):  # the grid's first run compares the settings; it has diverged or has a score
        done = front("compare", *grid, f"RATES={rates}")
        assert done.returncode == 0 and "runs done" not in done.stdout, done.stderr
    assert (learns / "result.csv").stat().st_mtime_ns == stamp


def test_a_run_is_made_by_one_process_at_a_time(tmp_path):
    """If two processes make the same run, the second waits and finds the result."""
    words = [f"RUNS={tmp_path}", "SCHEMES=admin", "RATES=1e-3", "SEEDS=1", *TINY, TINY_MODEL]
    run = tmp_path / f"compare-{CHANGED}/admin-18l-lr1e-3-s1"
    with locked(run / ".guard-result"):
        command = [sys.executable, "-m", "recipes.research.grid", "compare", run.name, *words]
        second = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        assert f"{run}/.guard-result: taken by process {os.getpid()}" in second.stderr.readline()
        write_lines(run / "result.csv", ["made"])
    assert second.wait(60) == 0, second.stderr.read()
    assert (run / "result.csv").read_text() == "made\n" and not (run / "checkpoints").exists()


@pytest.mark.nightly
def test_sensitivity_small(tmp_path):
    words = ["SCHEMES=post-ln", "LRS=1e-3", "BETA2S=0.99", "LAYERS=1"]
    done = front("sensitivity", f"RUNS={tmp_path}", *TINY, TINY_MODEL, *words)
    assert done.returncode == 0 and (tmp_path / f"sensitivity-{CHANGED}/rates.png").exists(), (
        done.stdout[-3000:] + done.stderr
    )


@pytest.mark.nightly
def test_compare_on_real_text_small(tmp_path):
    """The first seed tries all rates. The other seed runs only at the best. The score is on the published text."""
    served = tmp_path / "served"
    served.mkdir()
    for split, size in (("train", 300), ("val", 40), ("test_2016_flickr", 20)):
        words = [f"Wort{number % 17} f\u00fcr {number % 13}." for number in range(size)]
        (served / f"{split}.de").write_text("\n".join(words) + "\n", encoding="utf-8")
        (served / f"{split}.en").write_text("\n".join(words).replace("f\u00fcr", "isn't") + "\n", encoding="utf-8")
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in sorted(served.iterdir())]
    (tmp_path / "sums").write_text("\n".join(sums) + "\n")
    given = ["PRESET=multi30k", f"DATA={served}", f"PREPARE_ARGS=--sums {tmp_path}/sums --merges 50"]
    grid = ["SCHEMES=admin", "DEPTHS=1", "RATES=1e-30 1e-2", "SEEDS=1 2"]
    done = front("compare", f"RUNS={tmp_path}", *TINY, f"{WARMUP} --max-tokens 200", *given, *grid)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (out,) = tmp_path.glob("compare-*-multi30k")
    rows = list(csv.DictReader((out / "runs.csv").open()))
    assert [(row["lr"], row["seed"]) for row in rows] == [("1e-30", "1"), ("1e-2", "1"), ("1e-2", "2")]
    assert all("tok:13a" in row["signature"] and row["bleu"] for row in rows)
    assert "| Admin " in (out / "table.md").read_text()


def test_a_crash_is_an_error_and_leaves_no_result(tmp_path):
    """A crash, for example by a wrong option, is reported in one line. Once corrected, the run is made again."""
    words = [f"RUNS={tmp_path}", "SCHEMES=admin", "DEPTHS=1", "RATES=1e-3", "SEEDS=1", *TINY, f"{TINY_MODEL} --typo"]
    done = front("compare", *words)
    run = tmp_path / f"compare-{CHANGED}-typo/admin-1l-lr1e-3-s1"
    assert done.returncode == 2 and f"1 of 1 runs failed; their output: {run}/job.log." in done.stderr
    assert "train ended with status 2: " in (run / "job.log").read_text() and "--typo" in done.stdout
    assert not (run / "result.csv").exists() and not list(run.glob("at-*"))
