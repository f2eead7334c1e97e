"""recipes/gpu_trial: can its report be believed, also of commands that failed, and is every command one that runs?"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import ROOT, make_environment

from recipes import recipe
from recipes.gpu_trial import run


def block(folder: Path) -> list[str]:
    """What is to be pasted, without the line about the machine."""
    return (folder / "report.md").read_text().split("```")[1].splitlines()[2:]


def test_repeats_what_was_measured(tmp_path: Path) -> None:
    """Times, counts of tests and those that failed, scores and validations; no other line."""
    printed = ["tokens 8, method fast, ms 3.0", "FAILED tests/a.py::b - it", "== 1 failed, 2 passed in 3s =="]
    printed += ["sacreBLEU      13.0", "update 30     7.1"]
    (tmp_path / "name.log").write_text("\n".join([f"{run.made_by()}: exit 1", *printed, "", "status 0, 1 s", ""]))
    run.run_missing(tmp_path, [("name", "exit 1")], 60)
    assert block(tmp_path) == ["name: status 0, 1 s: exit 1", *(f"  {' '.join(line.split())}" for line in printed)]


def test_goes_on_and_reports_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that ended well are not run again; those that failed are; none after its time; all are in the block."""
    count = f"sh -c 'echo x >> {shlex.quote(str(tmp_path))}/count; "
    good, bad = ("good", count + "echo tokens 8, method fast, ms 3.0'"), ("bad", count + "exit 3'")
    run.run_missing(tmp_path, [good], 60)
    run.run_missing(tmp_path, [good, bad], 60)
    run.run_missing(tmp_path, [good, bad], 60)
    run.run_missing(tmp_path, [good, ("late", "true")], 0)
    assert (tmp_path / "count").read_text() == "x\n" * 3
    first, measured, late = block(tmp_path)
    assert first.startswith("good: status 0, ") and measured == "  tokens 8, method fast, ms 3.0"
    assert late == "late: not run: true"
    run.run_missing(tmp_path, [bad], 60)
    assert block(tmp_path)[0].startswith("bad: status 3, ")
    monkeypatch.setattr(run, "made_by", lambda: "another card")  # and what was measured on this one is not said of it
    run.run_missing(tmp_path, [good], 0)
    assert block(tmp_path) == [f"good: not run: {good[1]}"]


def test_what_a_command_started_ends_with_its_time(tmp_path: Path) -> None:
    """A process that was left would keep the GPU's memory from the next command."""
    source = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    for limit in (2, 20):  # until it is long enough for the process to have started
        run.perform(f"python -c {shlex.quote(source)}", tmp_path / "log", limit, "said")
        _, first, *_, last = (tmp_path / "log").read_text().splitlines()
        if first:
            break
    assert last.startswith("stopped, its time was up, ")
    status, end = Path(f"/proc/{first}/status"), time.monotonic() + 60
    with suppress(FileNotFoundError, ProcessLookupError):
        while "State:\tZ" not in status.read_text():
            assert time.monotonic() < end
            time.sleep(0.1)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_commands_exist(device: str, tmp_path: Path) -> None:
    """In the order of what is learnt first: stock, plain and fast in fp16 and bf16, before anything else is timed."""
    commands = dict(run.commands_of(run.Trial(DEVICE=device), tmp_path))
    assert list(commands)[:3] == (["kernels", "fp16", "bf16"] if device == "cuda" else ["kernels", "fp32", "compiled"])
    for command in commands.values():
        words = command.split()
        assert words[:2] == ["python", "-m"] and words[2] in ("pytest", "recipes.gpu_trial.times")
        assert all((ROOT / word).exists() for word in words if word.startswith("tests"))


def test_a_method_trains_for_its_minutes(tmp_path: Path) -> None:
    """As many updates as fit, by the time measured, the same for all, each at its own rate; de-en by default."""
    (tmp_path / "fp16-8k.log").write_text("tokens 8192, method fast, ms 106.4, ratio 0.8\n")
    commands = dict(run.commands_of(run.Trial(DATA=str(tmp_path)), tmp_path))
    texts = [command for name, command in commands.items() if name.startswith("text-")]
    assert list(commands)[-3:] == ["text-admin", "text-pre-ln", "text-post-ln"]
    for command in texts:
        _, _, _, target, *words = shlex.split(command)
        given = recipe.read(target, dict(word.split("=", 1) for word in words) | {"DATA": str(tmp_path)}).settings
        assert (given.PAIR, given.UPDATES, given.WARMUP, given.PRESET) == ("de-en", 16920, 4000, "gpu")
    assert {command.split()[-1] for command in texts} == {"LR=0.0003", "LR=0.0001"}


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("DEVICE=cuda", "This machine has no GPU that torch can use; DEVICE=cpu tries the trial itself.\n"),
        ("DEVICE=tpu", "DEVICE=tpu cannot be; expected one of cuda cpu.\n"),
        ("MINUTES=0", "MINUTES=0 cannot be; expected a number above 0.\n"),
    ],
)
def test_refuses_in_one_line(word: str, line: str, tmp_path: Path) -> None:
    """As from make, which hands its variables down in the environment, before anything is made."""
    command = [sys.executable, "-m", "recipes.gpu_trial.run", f"RUNS={tmp_path}/runs"]
    more = make_environment(**dict([word.split("=")]))
    done = subprocess.run(command, cwd=ROOT, env=more, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == line and not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_times_real_steps() -> None:
    """Is there a line a method, of steps of fairseq's trainer that all updated, as the report reads it?"""
    words = [sys.executable, *run.COMMANDS["cpu"]["fp32"].split()[1:]]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if run.RESULT.match(line)]
    for method, line in zip(["stock", "plain", "fast"], lines, strict=True):
        row = dict(item.rsplit(" ", 1) for item in re.sub(r" \(.*?\)", "", line).split(", "))
        assert row["method"] == method and float(row["ms"]) > 0 and row["updates"] == "48" and row["attention"] == "bmm"
        low, high = re.search(r"\((.*) to (.*)\)", line).groups()
        assert float(low) <= float(row["ratio"]) <= float(high)
    assert "ratio 1.000 (1.000 to 1.000)" in lines[0]
