"""recipes/gpu_trial: can its report be believed, also of commands that failed, and is every command one that runs?"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
from conftest import ROOT

from recipes.gpu_trial import run

LOGS = {
    "times": ("noise\ntokens 8, method fast, ms 3.0\nstatus 0, 1 s", ["tokens 8, method fast, ms 3.0"]),
    "tests": (
        "FAILED tests/a.py::b - it\n== 1 failed, 2 passed in 3s ==\nstatus 1, 1 s",
        ["FAILED tests/a.py::b - it", "== 1 failed, 2 passed in 3s =="],
    ),
    "summary": ("sacreBLEU      13.0\nupdate 30     7.1\nstatus 0, 1 s", ["sacreBLEU 13.0", "update 30 7.1"]),
    "nothing": ("Segmentation fault\nstatus 139, 1 s", []),
}


@pytest.mark.parametrize("name", LOGS)
def test_repeats_what_was_measured(name: str, tmp_path: Path) -> None:
    text, results = LOGS[name]
    (tmp_path / "name.log").write_text(text)
    run.report(tmp_path, {"name": "make"})
    block = (tmp_path / "report.md").read_text().split("```")[1].splitlines()[2:]
    assert block == [f"name: {text.splitlines()[-1]}: make", *(f"  {line}" for line in results)]


def test_goes_on_and_reports_failures(tmp_path: Path) -> None:
    """Commands that ended well are not run again; those that failed are, and all are in the block to paste."""
    count = f"open('{tmp_path}/count', 'a').write('x'); "
    good, bad = count + "print('tokens 8, method fast, ms 3.0')", count + "1 / 0"
    todo = {"good": f"python -c {shlex.quote(good)}", "bad": f"python -c {shlex.quote(bad)}"}
    run.run_missing(tmp_path, {"good": todo["good"]}, todo, 60)
    block = (tmp_path / "report.md").read_text().split("```")[1]
    assert "good: status 0, " in block and "  tokens 8, method fast, ms 3.0" in block and "bad: not run" in block
    run.run_missing(tmp_path, todo, {}, 60)
    assert (tmp_path / "count").read_text() == "xx"
    assert "bad: status 1, " in (tmp_path / "report.md").read_text().split("```")[1]
    run.run_missing(tmp_path, todo, {}, 60)
    assert (tmp_path / "count").read_text() == "xxx"


def test_what_a_command_started_ends_with_its_time(tmp_path: Path) -> None:
    """A process that was left would keep the GPU's memory from the next command."""
    source = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    for limit in (2, 20):  # until it is long enough for the process to have started
        run.perform(f"python -c {shlex.quote(source)}", tmp_path / "log", limit)
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
    commands = run.COMMANDS[device]
    assert list(commands)[:3] == (["kernels", "fp16", "bf16"] if device == "cuda" else ["kernels", "fp32", "compiled"])
    for command in commands.values():
        words = command.split()
        assert words[:2] == ["python", "-m"] and words[2] in ("pytest", "recipes.gpu_trial.times")
        assert all((ROOT / word).exists() for word in words if word.startswith("tests"))


def test_a_method_trains_for_its_minutes(tmp_path: Path) -> None:
    """As many updates as fit, by the time measured, the same for all, each method at its own rate."""
    (tmp_path / "fp16-8k.log").write_text("tokens 8192, method fast, ms 100.0, ratio 0.8\n")
    args = Namespace(device="cuda", data=tmp_path, pair="de-en", minutes=30)
    commands = run.on_text(tmp_path, args)
    assert list(commands) == ["text-admin", "text-pre-ln", "text-post-ln"]
    assert all("UPDATES=18000 WARMUP=4000 " in command for command in commands.values())
    assert {command.split()[-1] for command in commands.values()} == {"LR=0.0003", "LR=0.0001"}


def test_refuses_a_machine_without_a_gpu(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["run", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="2"):
        run.main()
    assert "this machine has no GPU" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_times_real_steps() -> None:
    """Is there a line a method, of steps of fairseq's trainer that all updated, as the report reads it?"""
    words = [sys.executable, *run.COMMANDS["cpu"]["fp32"].split()[1:]]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if run.RESULT.match(line)]
    for method, line in zip(["stock", "plain", "fast"], lines, strict=True):
        row = dict(item.rsplit(" ", 1) for item in re.sub(r" \(.*?\)", "", line).split(", "))
        assert row["method"] == method and float(row["ms"]) > 0 and row["updates"] == "4" and row["attention"] == "bmm"
        low, high = re.search(r"\((.*) to (.*)\)", line).groups()
        assert float(low) <= float(row["ratio"]) <= float(high)
    assert "ratio 1.000 (1.000 to 1.000)" in lines[0]
