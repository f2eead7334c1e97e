"""recipes/bench: do they measure and report? (Not how fast: a timed test would fail on a busy machine.)"""

from __future__ import annotations

import csv
import gc
import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from recipes.bench import host, pages, started, waiting
from recipes.bench.conditions import keep
from recipes.bench.counting import counts
from recipes.bench.growth import exponents
from recipes.gpu_trial.steps import ON_CPU, step_cost


def kept(file: Path) -> list[dict[str, str]]:
    """The rows that a bench has written, each with where it was measured."""
    with file.open(newline="", encoding="utf-8") as rows:
        found = list(csv.DictReader(rows))
    assert all(len(row["commit"]) == 40 and row["device"] and row["torch"] == torch.__version__ for row in found)
    return found


def test_reports_host_time(tmp_path, capsys) -> None:
    """Is there a row a method, with fewer operations and waits of the fast layers, and is the device real again?"""
    assert host.main(f"--layers 2-1 --pairs 1 --csv {tmp_path}/host.csv".split()) == 0
    rows = {row["method"]: row for row in kept(tmp_path / "host.csv")}
    assert (
        list(rows) == ["post-ln", "admin-plain", "admin"] == re.findall(r"^(\S+) +2-1 ", capsys.readouterr().out, re.M)
    )
    assert rows["post-ln"]["step"] == "1.0" and all(float(row["step_ms"]) > 0 for row in rows.values())
    assert all(int(rows["admin"][name]) < int(rows["admin-plain"][name]) for name in ("operations", "waits"))
    assert torch.ones(1).is_cpu


@pytest.mark.slow
def test_reports_what_waiting_threads_cost(tmp_path, monkeypatch, capsys) -> None:
    """Two steps of a tiny model, alone and next to another process, which ends with it."""
    others: list[subprocess.Popen] = []

    def starting(command: list[str], **given: object) -> subprocess.Popen:
        others.append(subprocess.Popen(command, **given))
        return others[-1]

    passive = {"2, passive": {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}}
    monkeypatch.setattr(waiting, "settings", lambda threads: passive)
    monkeypatch.setattr(waiting, "subprocess", SimpleNamespace(Popen=starting))
    given = f"--sizes 1:16:64 --busy 1 --rounds 1 --steps 2 --csv {tmp_path}/waiting.csv".split()
    assert waiting.main(given) == 0
    rows = re.findall(r"^1:16:64 +(alone|next to 1 busy) +2, passive +([\d.]+) \(", capsys.readouterr().out, re.M)
    assert [where for where, _ in rows] == ["alone", "next to 1 busy"]
    written = kept(tmp_path / "waiting.csv")
    assert [(row["busy"], row["steps"]) for row in written] == [("0", "2"), ("1", "2")]
    assert all(0 < float(row["low"]) <= float(row["seconds"]) <= float(row["high"]) for row in written)
    (neighbour,) = others
    assert neighbour.returncode == -signal.SIGKILL, "it was still computing"


@pytest.mark.slow
def test_reports_what_huge_pages_save(tmp_path, monkeypatch, capsys) -> None:
    """Two steps of a tiny model with pages of either size."""
    assert pages.main(f"--sizes 1:16:64 --pairs 1 --steps 2 --csv {tmp_path}/pages.csv".split()) == 0
    ((seconds, ratio),) = re.findall(r"^1:16:64 +([\d.]+) ([\d.]+) \(", capsys.readouterr().out, re.M)
    (row,) = kept(tmp_path / "pages.csv")
    assert float(seconds) == pytest.approx(float(row["seconds"]), abs=6e-4)
    assert float(ratio) == pytest.approx(float(row["ratio"]), abs=6e-4)
    assert row["low"] == row["ratio"] == row["high"]


def test_huge_pages_come_second(monkeypatch) -> None:
    seconds = {None: [3.0, 2.0, 2.0], pages.HUGE["GLIBC_TUNABLES"]: [1.0, 1.0, 9.0]}
    monkeypatch.setattr(started, "timed", lambda given, steps, clock, told: seconds[told.get("GLIBC_TUNABLES")])
    assert pages.pair("1:16:64", 3) == (2.0, 1.0)


def told(monkeypatch, settings) -> list[dict[str, str]]:
    """What processes that are started with settings are told of threads and memory."""
    given = []

    def run(command: list[str], env: dict[str, str], **_: object) -> SimpleNamespace:
        given.append(
            {name: value for name, value in env.items() if "OMP" in name or "MALLOC" in name or "GLIBC" in name}
        )
        return SimpleNamespace(stdout="[1.0]\n")

    monkeypatch.setattr(started, "subprocess", SimpleNamespace(run=run, PIPE=None))
    for setting in settings:
        assert started.timed("1:16:64", 1, "cpu", setting) == [1.0]
    return given


def test_a_setting_is_all_that_a_process_is_told_of_threads_and_memory(monkeypatch) -> None:
    """A recipe's, or the user's, would be the same in every row."""
    for name, value in {"OMP_WAIT_POLICY": "PASSIVE", "GLIBC_TUNABLES": "x=1", "MALLOC_ARENA_MAX": "1"}.items():
        monkeypatch.setenv(name, value)
    assert told(monkeypatch, waiting.settings(4).values()) == [
        {"OMP_NUM_THREADS": "1"},
        {"OMP_NUM_THREADS": "4"},
        {"OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "PASSIVE"},
        {"OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"},
    ]
    assert told(monkeypatch, [{**pages.THREAD, **pages.HUGE}]) == [{"OMP_NUM_THREADS": "1", **pages.HUGE}]


@pytest.mark.slow
def test_reports_what_an_average_costs(tmp_path) -> None:
    """Does a tiny run print finite ratios of memory, time and size, and leave nothing behind?"""
    folder = tmp_path / "folder"
    folder.mkdir()
    sizes = f"--arch transformer_admin_tiny --words 50 --number 2 --optimizer-state --folder {folder}".split()
    command = [sys.executable, str(ROOT / "recipes/bench/average.py"), *sizes, "--csv", str(tmp_path / "average.csv")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    rows = re.findall(r"^(\S.*?), average / (.*?)  .*?([\d.]+) +([\d.]+) (?:MiB|s) +([\d.]+)", done.stdout, re.M)
    assert [(what, beside) for what, beside, *_ in rows] == [
        ("peak memory", "one model"),
        ("peak memory", "plain average"),
        ("wall time", "plain average"),
        ("size of the file", "plain"),
    ], done.stdout
    assert all(float(number) > 0 for row in rows for number in row[2:]), done.stdout
    assert float(rows[0][2]) > 50, "less than a process with torch needs"
    assert not list(folder.iterdir())
    told = [(row["what"].split(", ")[0], f"{float(row['ratio']):.3f}") for row in kept(tmp_path / "average.csv")]
    assert told == [(row[0], row[4]) for row in rows]


@pytest.mark.slow
def test_reports_the_text_steps_beside_other_programs(tmp_path) -> None:
    """Does a tiny run print lines per second and a ratio of times for each step, and learn subword-nmt's merges?"""
    small = f"--lines 200 --merges 50 --rounds 1 --csv {tmp_path}/text.csv".split()
    command = [sys.executable, str(ROOT / "recipes/bench/text_steps.py"), *small]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    rows = re.findall(
        r"^(tokenise|tokenise .*?|clean .*?|learn|apply) +(\d+) .*?([\d.]+|nan)(?:  |$)", done.stdout, re.M
    )
    assert [name.split()[0] for name, *_ in rows] == ["tokenise", "tokenise", "clean", "learn", "apply"], done.stdout
    assert all(int(lines) > 0 for _, lines, _ in rows)
    # With so few lines, many pairs are equally frequent, and are merged in any order.
    assert int(re.search(r"(\d+) of 50 merges the same", done.stdout)[1]) >= 35
    assert "200 of 200 lines the same" in done.stdout
    told = [(row["step"].split()[0], f"{float(row['lines_per_s']):.0f}") for row in kept(tmp_path / "text.csv")]
    assert told == [(name.split()[0], lines) for name, lines, _ in rows]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_reports_what_fast_layers_save(tmp_path) -> None:
    """Does a tiny run, as the GPU trial starts it, give a row a method, with lower counts for fast Admin than plain?"""
    scale = replace(ON_CPU, layers=((1, 1), (3, 2)))
    # Nine processes load torch one after the other, which takes a busy machine a quarter of an hour.
    told = {row["method"]: row for row in step_cost(scale, "float32", 64, tmp_path, limit=1700)}
    found = json.loads((tmp_path / "bench-float32-64.json").read_text())
    assert {(row["layers"], row["decoder_layers"]) for row in found["rows"]} == {(3, 2)}
    rows = {row["method"]: row for row in found["rows"]}
    assert list(rows) == list(told) == ["post-ln", "pre-ln", "admin-plain", "admin"]
    assert {"commit", "device", "torch", "fairseq_admin_start_up_s"} <= set(found["conditions"])
    assert rows["admin"]["profile_steps"] > 0 and told["post-ln"]["ratio"] == 1
    for name in ("operations", "waits", "kept_mib"):
        assert 0 < rows["admin"][name] < rows["admin-plain"][name], name
    assert all(row[name] > 0 for row in rows.values() for name in ("step_ms", "optimizer_ms", "loss_ms", "model_mib"))
    keep(tmp_path / "speed.csv", found["conditions"], found["rows"])
    assert [row["method"] for row in kept(tmp_path / "speed.csv")] == list(rows)


@pytest.mark.parametrize("size", ["6:512", "0:16:64", "6-:16:64", "6:100:64:", "2:250:64"])
def test_refuses_what_is_no_size(size: str) -> None:
    """One line that says what a size is, before anything is measured."""
    command = [sys.executable, str(ROOT / "recipes/bench/speed.py"), "--sizes", size]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert f"argument --sizes: '{size}'" in done.stderr and "expected" in done.stderr


def test_counting_leaves_nothing_behind() -> None:
    """All activations of every model counted stayed in memory, until the machine had none left."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh())

    def tensors() -> int:
        gc.collect()
        return sum(isinstance(it, torch.Tensor) for it in gc.get_objects())

    before = tensors()
    found = counts(model, lambda: model(torch.ones(3, 4)).sum())
    assert found["kept_mib"] * 2**20 == 4 * (3 * 4 + 3 * 8)  # the input, and tanh's output
    assert tensors() == before


def test_growth_is_the_slope_of_the_logarithms() -> None:
    """Of times that are 3 size^1.5 in depth and 2 size in tokens, to rounding."""

    def row(layers: int, tokens: int, time: float) -> dict:
        fixed = {"method": "admin", "width": 512, "decoder_layers": layers}
        return {**fixed, "layers": layers, "tokens": tokens, "step_ms": time}

    deep = [row(n, 1024, 3 * (2 * n) ** 1.5) for n in (6, 18, 60)]
    long = [row(6, n, deep[0]["step_ms"] * n / 1024) for n in (2048, 4096)]
    found = {fit["along"]: fit["exponent"] for fit in exponents([*deep, *long])}
    assert found == {"depth": pytest.approx(1.5), "tokens": pytest.approx(1.0)}
