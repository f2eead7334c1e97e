"""recipes/gpu_trial: is its report right, even for failed commands, and does every command run?"""

from __future__ import annotations

import csv
import importlib.util
import re
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import ROOT, make_environment
from reference import batch, build
from torch.utils.flop_counter import FlopCounterMode

from recipes import recipe
from recipes.bench import step
from recipes.bench.common import machine
from recipes.gpu_trial import run
from recipes.gpu_trial.flops import training_flops, utilisation

STILL = {"dropout": 0.0, "attention_dropout": 0.0}


HERE = ", ".join(f"{name} {value}" for name, value in machine().items())


def block(folder: Path) -> list[str]:
    """The block to paste, without the line about the machine."""
    return (folder / "report.md").read_text().split("```")[1].splitlines()[2:]


def test_repeats_what_was_measured(tmp_path: Path) -> None:
    """Does it repeat only times, test counts, failed tests, scores and validation losses?"""
    printed = ['row: {"what": "fast", "ms": 3.0}', "FAILED tests/a.py::b - it", "== 1 failed, 2 passed in 3s =="]
    printed += ["sacreBLEU      13.0", "update 30     7.1"]
    (tmp_path / "name.log").write_text("\n".join([f"{HERE}: exit 1", *printed, "", "status 0, 1 s", ""]))
    run.run_missing(tmp_path, [("name", "exit 1")], 60)
    assert block(tmp_path) == ["name: status 0, 1 s: exit 1", *(f"  {' '.join(line.split())}" for line in printed)]


def test_goes_on_and_reports_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Are failed commands run again, and successful ones not?

    After the time limit, no command may start. The report must name every command.
    """
    count = f"sh -c 'echo x >> {shlex.quote(str(tmp_path))}/count; "
    good, bad = ("good", count + "exit 0'"), ("bad", count + "exit 3'")
    run.run_missing(tmp_path, [good], 60)
    run.run_missing(tmp_path, [good, bad], 60)
    run.run_missing(tmp_path, [good, bad], 60)
    run.run_missing(tmp_path, [good, ("late", "true")], 0)
    assert (tmp_path / "count").read_text() == "x\n" * 3
    first, late = block(tmp_path)
    assert first.startswith("good: status 0, ")
    assert late == "late: not run: true"
    run.run_missing(tmp_path, [bad], 60)
    assert block(tmp_path)[0].startswith("bad: status 3, ")
    # rows of this machine are not reported for another
    monkeypatch.setattr(run, "machine", lambda: {"device": "another card"})
    run.run_missing(tmp_path, [good], 0)
    assert block(tmp_path) == [f"good: not run: {good[1]}"]


def test_what_a_command_started_ends_with_its_time(tmp_path: Path) -> None:
    """When a command's time is up, do its child processes end, too? Otherwise they would hold GPU memory."""
    source = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    for limit in (2, 20):  # until the process has had time to start
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


def test_commands_exist(tmp_path: Path) -> None:
    """Do the card's ceilings come first, and the tests last?

    After the ceilings come steps in fp16: recorded steps, fast steps, and stock steps with the best optimizer.
    """
    commands = dict(run.commands_of(run.Trial(DEVICE="cuda"), tmp_path))
    assert list(commands)[:4] == ["ceilings", "graph-fp16", "fast-fp16", "stock-adamw-fp16"]
    assert list(commands)[-2:] == ["kernels", "trainings"] and {"stock-bf16", "plain-fp16"} < set(commands)
    for name, command in commands.items():
        kind, _, last = name.rpartition("-")
        assert kind in ("", "bert", *step.METHODS)
        words = command.split()
        assert words[:2] == ["python", "-m"] and importlib.util.find_spec(words[2])
        assert all((ROOT / word).exists() for word in words if word.startswith("tests"))


def test_flops_are_those_of_the_products() -> None:
    """Does the count equal torch's for a forward and a backward? docs/results.md has 0.89 GFLOP per token pair."""
    sizes = {"encoder_layers": 3, "decoder_layers": 2, **STILL}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_embed_dim": 32, f"{side}_ffn_embed_dim": 48, f"{side}_attention_heads": 4}
    model = build("transformer_admin", admin_fast="on", admin_init="log", **sizes)
    src, lengths, prev = batch(4, 19, 17)
    with FlopCounterMode(display=False) as counter:
        model(src, lengths, prev)[0].sum().backward()
    expected = training_flops(4, 19, 17, layers=(3, 2), width=32, ffn=48, words=104)
    assert counter.get_total_flops() == expected
    pair = training_flops(1, 1, 1, layers=(18, 18), width=512, ffn=2048, words=32004)
    assert pair == pytest.approx(0.89e9, rel=0.005)
    assert utilisation(989e12, 2, "NVIDIA H100 80GB HBM3") == 0.5 and utilisation(1, 1, "CPU") is None


def test_a_method_trains_for_its_minutes(tmp_path: Path) -> None:
    """Do all methods train for the same number of updates: as many as fit into the minutes, by the measured step time?

    Each method uses its own learning rate. Admin uses the rule of ω for which its learning rate was found. The default
    pair is de-en.
    """
    (tmp_path / "fast-fp16.log").write_text('row: {"what": "fast", "tokens": 8192, "ms": 106.4}\n')
    commands = dict(run.commands_of(run.Trial(DATA=str(tmp_path)), tmp_path))
    texts = [command for name, command in commands.items() if name.startswith("text-")]
    assert list(commands)[-3:] == ["text-admin", "text-pre-ln", "text-post-ln"]
    for command in texts:
        _, _, _, target, *words = shlex.split(command)
        given = recipe.read(target, dict(word.split("=", 1) for word in words) | {"DATA": str(tmp_path)}).settings
        assert (given.PAIR, given.UPDATES, given.WARMUP, given.PRESET) == ("de-en", 16920, 4000, "gpu")
        assert given.INIT == "reference"
    assert {command.split()[-1] for command in texts} == {"LR=0.0003", "LR=0.0001"}


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("DEVICE=cuda", "This machine has no GPU that torch can use; DEVICE=cpu tries the trial itself.\n"),
        ("DEVICE=tpu", "DEVICE=tpu is invalid: input should be 'cuda' or 'cpu' (cpu tries it with tiny sizes, "),
        ("MINUTES=0", "MINUTES=0 is invalid: input should be greater than 0 (that each of the three may take).\n"),
    ],
)
def test_refuses_in_one_line(word: str, line: str, tmp_path: Path) -> None:
    """Are mistakes refused in one line before any work, even with make's variables in the environment?"""
    command = [sys.executable, "-m", "recipes.gpu_trial.run", f"RUNS={tmp_path}/runs"]
    more = make_environment(**dict([word.split("=")]))
    done = subprocess.run(command, cwd=ROOT, env=more, capture_output=True, text=True)
    named, said = done.stderr.splitlines(keepends=True)
    assert named == f"From the environment: {word}.\n" and said.startswith(line)
    assert done.returncode == 2 and not (tmp_path / "runs").exists()


ROWS = {
    "ceilings": ["copy", "product", "product"],
    **{f"{method}-fp32": [method] for method in ("fast", "stock", "plain", "stock-adamw", "graph")},
    **{f"bert-{method}": [f"bert {method}"] for method in ("stock", "attached", "compiled")},
}
"""The rows that each measurement on a CPU writes."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if "compiled" in name else pytest.mark.slow) for name in ROWS]
)
def test_every_measurement_writes_its_rows(name: str, tmp_path: Path) -> None:
    """Does every measurement end with status 0, write rows with min ≤ time ≤ max, and update the weights?"""
    commands = dict(run.commands_of(run.Trial(DEVICE="cpu"), tmp_path))
    run.run_missing(tmp_path, [(name, commands[name])], 600)
    first, *printed = block(tmp_path)
    assert first.startswith(f"{name}: status 0, "), (tmp_path / f"{name}.log").read_text()[-3000:]
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["what"] for row in rows] == ROWS[name] and len(printed) == len(rows)
    for row in rows:
        assert 0 < float(row["low"]) <= float(row["ms"]) <= float(row["high"])
        assert row["device"] and re.match("[0-9a-f]{12}", row["commit"])
    if "updates" in rows[0]:
        assert rows[0]["updates"] == "9" and float(rows[0]["tflops"]) > 0 and rows[0]["mfu"] == ""


def test_every_measurement_is_tested(tmp_path: Path) -> None:
    assert set(ROWS) == set(dict(run.commands_of(run.Trial(DEVICE="cpu"), tmp_path))) - set(run.TESTS)
