"""recipes/gpu_trial: can its report be believed, also of commands that failed, and is every command one that runs?"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
from conftest import ROOT

from recipes.gpu_trial import run
from recipes.gpu_trial.times import METHODS

PYTHON = [sys.executable, "-c"]
OUTPUT = {
    "times": ('noise\n{"method": "fast", "ms": 3}\n{"broken', [{"method": "fast", "ms": 3}]),
    "tests": (
        "FAILED tests/a.py::b - it\n== 1 failed, 2 passed in 3s ==\n",
        [{"result": "1 failed, 2 passed in 3s"}, {"result": "FAILED tests/a.py::b - it"}],
    ),
    "summary": ("sacreBLEU      13.0\nupdate 30     7.1", [{"result": "sacreBLEU 13.0"}, {"result": "update 30 7.1"}]),
    "nothing": ("Segmentation fault\n", []),
}


@pytest.mark.parametrize("output", OUTPUT)
def test_reads_what_was_measured(output: str, tmp_path: Path) -> None:
    text, expected = OUTPUT[output]
    (tmp_path / "name.log").write_text(text)
    assert run.rows(tmp_path, "name") == expected


def test_goes_on_and_reports_failures(tmp_path: Path) -> None:
    """Commands that ended well are not run again; those that failed are, and all are in the block to paste."""
    count = f"open('{tmp_path}/count', 'a').write('x'); "
    todo = {"good": [*PYTHON, count + 'print(\'{"method": "fast", "ms": 3}\')'], "bad": [*PYTHON, count + "1 / 0"]}
    run.run_missing(tmp_path, {"good": todo["good"]}, todo, 60)
    block = (tmp_path / "report.md").read_text().split("```")[1]
    assert "good: status 0, " in block and "  method fast, ms 3" in block and "bad: not run" in block
    run.run_missing(tmp_path, todo, {}, 60)
    assert (tmp_path / "count").read_text() == "xx"
    assert "bad: status 1, " in (tmp_path / "report.md").read_text().split("```")[1]
    run.run_missing(tmp_path, todo, {}, 60)
    assert (tmp_path / "count").read_text() == "xxx"


def test_what_a_command_started_ends_with_its_time(tmp_path: Path) -> None:
    """A process that was left would keep the GPU's memory from the next command."""
    source = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    for limit in (2, 20):  # until it is long enough for the process to have started
        run.perform([*PYTHON, source], tmp_path / "log", limit)
        first, *_, last = (tmp_path / "log").read_text().splitlines()
        if first:
            break
    assert last.startswith("stopped, its time was up, ")
    time.sleep(0.2)
    status = Path(f"/proc/{first}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_commands_exist(device: str) -> None:
    """In the order of what is learnt first: stock, plain and fast in fp16 and bf16, before anything else is timed."""
    commands = run.commands(device)
    assert list(commands)[:3] == (["kernels", "fp16", "bf16"] if device == "cuda" else ["kernels", "fp32", "compiled"])
    for words in commands.values():
        assert words[2] in ("pytest", "recipes.gpu_trial.times")
        assert all((ROOT / word).exists() for word in words if word.startswith("tests"))


def test_a_method_trains_for_its_minutes(tmp_path: Path) -> None:
    """As many updates as fit, by the time measured, the same for all, each method at its own rate."""
    (tmp_path / "fp16-8k.log").write_text(json.dumps({"method": "fast", "ms": 100}) + "\n")
    args = Namespace(device="cuda", data=tmp_path, pair="de-en", minutes=30)
    commands = run.on_text(tmp_path, args)
    assert list(commands) == ["text-admin", "text-pre-ln", "text-post-ln"]
    assert all("UPDATES=18000" in words and "WARMUP=4000" in words for words in commands.values())
    assert {words[-1] for words in commands.values()} == {"LR=0.0003", "LR=0.0001"}


@pytest.mark.parametrize(
    ("given", "said"), [("--minutes nan --device cpu", "MINUTES=nan is not a time"), ("", "this machine has no GPU")]
)
def test_refuses(given: str, said: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["run", str(tmp_path / "out"), *given.split()])
    with pytest.raises(SystemExit, match="2"):
        run.main()
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_times_real_steps() -> None:
    """Is there a row a method, of steps of fairseq's trainer that all updated, as the report reads it?"""
    words = run.commands("cpu")["fp32"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["method"] for row in rows] == list(METHODS)
    for row in rows:
        assert row["ms"] > 0 and row["low"] <= row["ratio"] <= row["high"] and row["updates"] == 4
    assert rows[0]["ratio"] == 1
