"""recipes/bench: do they measure and report? (Not how fast: a timed test would fail on a busy machine.)"""

from __future__ import annotations

import csv
import gc
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from recipes.bench import host
from recipes.bench.counting import counts


def kept(file: Path) -> list[dict[str, str]]:
    """The rows that a bench wrote, each with its machine."""
    with file.open(newline="", encoding="utf-8") as rows:
        found = list(csv.DictReader(rows))
    assert all(
        re.match("[0-9a-f]{12}", row["commit"]) and row["device"] and row["torch"] == torch.__version__ for row in found
    )
    return found


def test_reports_host_time(tmp_path, capsys) -> None:
    """Is there one row per method, with fewer operations and waits for fast layers, and is the real device restored?"""
    host.main(f"--layers 2-1 --pairs 1 --csv {tmp_path}/host.csv".split())
    rows = {row["method"]: row for row in kept(tmp_path / "host.csv")}
    printed = re.findall(r"^(\S+) +2 +1 ", capsys.readouterr().out, re.M)
    assert list(rows) == ["post-ln", "admin-plain", "admin"] == printed
    assert rows["post-ln"]["step"] == "1.0" and all(float(row["step_ms"]) > 0 for row in rows.values())
    assert all(int(rows["admin"][name]) < int(rows["admin-plain"][name]) for name in ("operations", "waits"))
    assert torch.ones(1).is_cpu


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_reports_what_fast_layers_save(tmp_path) -> None:
    """Is there one row per method, with lower counts for fast Admin than for plain?"""
    command = [sys.executable, "-m", "recipes.bench.speed", "--sizes", "3-2:16:64", "--pairs", "1"]
    done = subprocess.run([*command, "--csv", str(tmp_path / "speed.csv")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = {row["method"]: row for row in kept(tmp_path / "speed.csv")}
    assert list(rows) == ["post-ln", "pre-ln", "admin-plain", "admin"] and float(rows["admin"]["profile_steps"]) > 0
    for name in ("waits", "kept_mib"):  # host.py counts operations, which matter on a GPU
        assert 0 < float(rows["admin"][name]) < float(rows["admin-plain"][name]), name


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        host.main(["--csv", str(tmp_path)])
    out, err = capsys.readouterr()
    assert out == "" and f"--csv: {tmp_path} cannot be written: Is a directory" in err


def test_counting_leaves_nothing_behind() -> None:
    """Does counting free its memory? It once kept all activations of every model, until memory ran out."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh())

    def tensors() -> int:
        gc.collect()
        return sum(isinstance(it, torch.Tensor) for it in gc.get_objects())

    before = tensors()
    found = counts(model, lambda: model(torch.ones(3, 4)).sum())
    assert found["kept_mib"] * 2**20 == 4 * (3 * 4 + 3 * 8)  # the input, and tanh's output
    assert tensors() == before
