"""The grids: their runs, what they are held to, and the chain run small from the shell."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import conftest
import pytest
from conftest import run_module

from recipes.grid import front
from recipes.grid.front import of, plan
from recipes.grid.grids import Point
from recipes.grid.run import Run
from recipes.recipe import read
from recipes.steps.common import write_lines
from recipes.steps.guard import exclusive_folder

ROOT = Path(__file__).parents[1]
TINY = "PAIRS=300 VALID_PAIRS=50 TEST_PAIRS=20 WORDS=20 WIDTH=16 FFN=16 UPDATES=20 SAVE_EVERY=10 LOG_EVERY=5".split()
WARMUP = "WARMUP=5"


def planned(target: str, folder: Path, *words: str) -> list[str]:
    """What a plan says of each run, by its folder below this one, in its order."""
    lines = plan(of(read(target, dict(word.split("=", 1) for word in (f"RUNS={folder}", *words)))))
    assert not list(folder.iterdir())
    return [line.removeprefix(f"run   {folder}/") for line in lines]


def test_rates_are_tried_on_the_first_seed(tmp_path):
    """And on real text in a folder of short runs; the others are known once there are results."""
    given = ["SCHEMES=admin", "RATES=1e-4 1e-3", "SEEDS=1 2"]
    tried, then = ["admin-18l-lr1e-4-s1", "admin-18l-lr1e-3-s1"], "then the best of those, as the results will show"
    all_seeds = [*tried, "admin-18l-lr1e-4-s2", "admin-18l-lr1e-3-s2"]
    assert planned("compare", tmp_path, *given) == [f"compare/{name}" for name in all_seeds]
    assert planned("compare", tmp_path, *given, "SEARCH=first") == [*(f"compare/{name}" for name in tried), then]
    short = [f"compare-multi30k/search/{name}" for name in tried]
    assert planned("compare", tmp_path, *given, "PRESET=multi30k") == [*short, then]


def test_a_grid_is_held_to_how_often_its_runs_are_validated(tmp_path):
    """Their outcome is of the last validations. Grids of before have no record of it."""
    usual, other = (
        of(read("compare", {"RUNS": str(tmp_path), **given})).record() for given in ({}, {"SAVE_EVERY": "50"})
    )
    assert {**usual, "save_every": "50"} == other


def test_what_a_run_at_work_writes_stays(tmp_path, monkeypatch):
    """A job of a cluster, while the same grid is called again; what a killed one left goes when it runs again."""
    grid = of(read("compare", {"RUNS": str(tmp_path)}))
    half = grid.folder / "admin-18l-lr1e-3-s1/generate.txt.part"
    half.parent.mkdir(parents=True)
    half.touch()
    monkeypatch.setattr(front, "make", lambda grid: None)
    front.work(grid)
    assert half.exists()
    with exclusive_folder(half.parent):
        assert not half.exists()


def row(point: Point, bits: float) -> dict:
    """A result of a run that learned."""
    kept = {"update": None, "left": 1.0, "entropy": 6.0, "bleu": 1.0, "signature": "s", "params": 1, "seconds": 2}
    curve = {"train": {"10": bits}, "valid": {"10": bits}, "hardware": "h", "commit": "c"}
    return {**point.axes, "verdict": "learned", "bits": bits, **kept, **curve}


@pytest.mark.parametrize(("search", "seeds"), [("first", ["2", "3"]), ("short", ["1", "2", "3"])])
def test_the_seeds_run_at_the_best_rate(search, seeds, tmp_path):
    """All that have not run at it yet; those of short runs, in a folder of their own, have not."""
    grid = of(read("compare", {"SEARCH": search, "SCHEMES": "admin", "RUNS": str(tmp_path)}))
    trial = grid.trial()
    tried = next((trial or grid).stages())
    assert [point.axes["seed"] for point in tried] == ["1"] * 4 and (trial is not None) == (search == "short")
    assert not trial or (trial.settings.UPDATES, trial.folder.name) == (1000, "search")
    for point, bits in zip(tried, (3.0, 1.0, 2.0, 4.0)):
        write_lines((trial or grid).folder / point.name / "result.json", [json.dumps(row(point, bits))])
    *_, last = grid.stages()
    assert [point.name for point in last] == [f"admin-18l-lr3e-4-s{seed}" for seed in seeds]


@pytest.mark.parametrize(
    ("target", "given", "first", "count"),
    [
        ("compare", "DEPTHS=6 TIED=no FFN_INIT=stock DROPOUT=0.1 MAX_TOKENS=9",
         "compare-tokens9-dropout0.1-untied-ffn-stock/admin-6l-lr1e-4-s1", 216),
        ("compare", "PRESET=multi30k SEARCH=every SCHEMES=admin DEPTHS=60-12 INIT=constant RATES=1e-3 SEEDS=1",
         "compare-constant-multi30k/admin-60-12l-lr1e-3-s1", 1),
        ("sensitivity", "PRESET=gpu", "sensitivity-gpu/post-ln-lr1e-4-b0.99-s1", 45),
        ("warmup", "", "warmup/post-ln-adam-w0-lr5e-4-s1", 54),
        ("warmup", "QUICK=1", "warmup-quick/post-ln-adam-w0-lr1e-3-s1", 12),
        ("deeper", "FACTOR=0 DROPOUT=0.1", "deeper-factor0-dropout0.1/encoder", 78),
    ],
)  # fmt: skip
def test_where_the_runs_of_a_grid_are(target, given, first, count, tmp_path):
    runs = planned(target, tmp_path, *given.split())
    assert (runs[0], len(runs)) == (first, count)


def test_a_point_has_its_depths_and_its_rule(tmp_path):
    """The decoder may have another depth. Only a scheme that has omega gets a rule, in its options and in its row."""
    folder = tmp_path / "compare-constant"
    write_lines(folder / "entropy.json", ['{"bits": 6.0}'])
    given = {"INIT": "constant", "SCHEMES": "admin pre-ln", "DEPTHS": "6 60-12", "RATES": "1e-3", "SEEDS": "1"}
    grid = of(read("compare", {**given, "SEARCH": "every", "RUNS": str(tmp_path)}))
    runs = [grid.run(point) for point in grid.points()]
    depths = [
        [run.options[run.options.index(f"--{side}-layers") + 1] for side in ("encoder", "decoder")] for run in runs
    ]
    assert depths == [["6", "6"], ["60", "12"]] * 2
    assert [("--admin-init" in run.options, run.by["rule"]) for run in runs] == [(True, "constant")] * 2 + [
        (False, "")
    ] * 2


def test_what_a_grid_is_held_to_is_what_it_was():
    """The folders of docs/compare.csv and its like are gone on with: names, types and words of the first version."""
    record = of(read("compare", {})).record()
    assert record == {
        **{"updates": "1500", "leg": "500", "beam": "5", "ffn_init": "xavier"},
        **{"pairs": "20000/1000/1000", "words": "100"},
        **{"--arch": "transformer_admin", "--encoder-embed-dim": "128", "--encoder-ffn-embed-dim": "256"},
        **{"--encoder-attention-heads": "4", "--decoder-attention-heads": "4", "--share-all-embeddings": "on"},
        **{"--dropout": "0.0", "--optimizer": "radam", "--adam-betas": "(0.9, 0.98)", "--clip-norm": "0.0"},
        **{"--criterion": "label_smoothed_cross_entropy_fast", "--label-smoothing": "0.1", "--max-tokens": "192"},
        **{"--required-batch-size-multiple": "1", "--log-interval": "10", "--lr-scheduler": "inverse_sqrt"},
        **{"--warmup-updates": "100", "--warmup-init-lr": "1e-7", "--cpu": "on", "--num-workers": "0"},
    }  # fmt: skip


@pytest.mark.slow
def test_a_grid_of_two_runs(tmp_path):
    """Killed in the middle, it goes on; what is done stays; another setting is refused; a diverged run is a row."""
    grid = ["SCHEMES=admin", "DEPTHS=1", "RATES=1e-3 1e38", "SEEDS=1", *TINY, WARMUP]
    out = tmp_path / "compare"
    log = (tmp_path / "log").open("wb")
    command = [sys.executable, "-m", "recipes", "compare", f"RUNS={tmp_path}", *grid, "UPDATES=100000"]
    running = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
    checkpoints = out / "admin-1l-lr1e-3-s1/checkpoints"
    try:
        until = time.monotonic() + 600
        while not list(checkpoints.glob("checkpoint_*_*0.pt")):
            assert running.poll() is None and time.monotonic() < until, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.2)
        second = conftest.front("compare", f"RUNS={tmp_path}", *grid, "UPDATES=100000")
        assert second.returncode == 2 and f"{out}: process " in second.stderr and "is at work there" in second.stderr
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    assert not (out / "admin-1l-lr1e-3-s1/trained.json").exists() and not (out / "table.md").exists()
    done = conftest.front("compare", f"RUNS={tmp_path}", *grid)
    assert done.returncode != 0 and "was made with other settings (updates 100000 -> 20" in done.stderr
    (out / "settings.json").unlink()
    kept = max(int(path.stem.rpartition("_")[2]) for path in checkpoints.glob("checkpoint_*_*0.pt"))
    grid += [f"RUNS={tmp_path}", f"UPDATES={kept + 20}", f"LEG={kept + 20}", "JOBS=2"]
    done = conftest.front("compare", *grid)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"Loaded checkpoint {checkpoints}/" in (out / "admin-1l-lr1e-3-s1/train.log").read_text()
    whole, diverged = csv.DictReader((out / "runs.csv").open())
    assert whole["verdict"] in ("learned", "plateau") and 0 < float(whole["bits"]) < 20 and whole["signature"]
    assert diverged["verdict"] == "diverged" and not diverged["bleu"]
    assert re.search(r"\| Admin +\| 1 +\| 1e-3 ", done.stdout) and (out / "curves.png").exists()
    assert "2 runs, 0 of them done; 2 at a time\n" in done.stdout and "; 2 of 2 runs done\n" in done.stdout
    assert not list(out.rglob("*.part")) and not list(out.rglob("*.pt"))
    stamp = (out / "admin-1l-lr1e-3-s1/result.json").stat().st_mtime_ns
    # A folder of an earlier version has no description of a run.
    (out / "admin-1l-lr1e-3-s1/run.json").unlink()
    done = conftest.front("compare", *grid)
    assert done.returncode == 0 and "runs done" not in done.stdout
    assert (out / "admin-1l-lr1e-3-s1/result.json").stat().st_mtime_ns == stamp


@pytest.mark.nightly
def test_sensitivity_small(tmp_path):
    done = conftest.front(
        "sensitivity", f"RUNS={tmp_path}", *TINY, "SCHEMES=post-ln", "LRS=1e-3", "BETA2S=0.99", "LAYERS=1"
    )
    assert done.returncode == 0 and (tmp_path / "sensitivity/rates.png").exists(), done.stdout[-3000:] + done.stderr


@pytest.mark.nightly
def test_compare_on_real_text_small(tmp_path):
    """The rates are tried in short runs, all seeds run at the best; the score is of the published text."""
    served = tmp_path / "served"
    served.mkdir()
    for split, size in (("train", 300), ("val", 40), ("test_2016_flickr", 20)):
        words = [f"Wort{number % 17} f\u00fcr {number % 13}." for number in range(size)]
        (served / f"{split}.de").write_text("\n".join(words) + "\n", encoding="utf-8")
        (served / f"{split}.en").write_text("\n".join(words).replace("f\u00fcr", "isn't") + "\n", encoding="utf-8")
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in sorted(served.iterdir())]
    (tmp_path / "sums").write_text("\n".join(sums) + "\n")
    given = ["PRESET=multi30k", f"DATA={served}", f"SUMS={tmp_path}/sums", "MERGES=50", "MAX_TOKENS=200", "SHORT=20"]
    grid = ["SCHEMES=admin", "DEPTHS=1", "RATES=1e-30 1e-2", "SEEDS=1 2"]
    done = conftest.front("compare", f"RUNS={tmp_path}", *TINY, WARMUP, *given, *grid)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    out = tmp_path / "compare-tokens200-multi30k"
    runs, tried = (list(csv.DictReader((out / name).open())) for name in ("runs.csv", "search/runs.csv"))
    assert [(row["lr"], row["seed"]) for row in tried] == [("1e-30", "1"), ("1e-2", "1")]
    assert [(row["lr"], row["seed"]) for row in runs] == [("1e-2", "1"), ("1e-2", "2")]
    assert all("tok:13a" in row["signature"] and row["bleu"] for row in runs)
    notes = (out / "standing.md").read_text()
    assert "tried on seed 1;" in notes and "were tried in runs of 20 updates." in notes


def test_a_crash_is_an_error_and_leaves_no_result(corpus, tmp_path):
    """A wrong option, say: one line, and the run is made again once it is right."""
    options = "--arch transformer_admin_tiny --optimizer adam --cpu --num-workers 0 --max-tokens 300 --typo".split()
    Run({}, str(corpus), options, 10, 10, 10).write(tmp_path / "run")
    done = run_module("recipes.grid.run", tmp_path / "run", log=tmp_path / "log")
    last = done.output.splitlines()[-1]
    assert (
        done.status == 2
        and re.search("train ended with status 2: .*--typo", last)
        and not (tmp_path / "run/trained.json").exists()
    )
