"""recipes/bench: do they measure and report? (Not how fast: a timed test would fail on a busy machine.)"""

from __future__ import annotations

import csv
import gc
import re
from pathlib import Path

import pytest
import torch

from fairseq_admin.fast.plain import Fast
from recipes.bench import speed
from recipes.bench.counting import counts


def kept(file: Path) -> list[dict[str, str]]:
    """The rows that a bench wrote, each with its machine."""
    with file.open(newline="", encoding="utf-8") as rows:
        found = list(csv.DictReader(rows))
    assert all(
        re.match("[0-9a-f]{12}", row["commit"]) and row["device"] and row["torch"] == torch.__version__ for row in found
    )
    return found


def test_reports_what_fast_layers_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Is there one row per method, with lower counts for fast Admin than for plain, and is the device restored?

    On a CPU, fast Admin keeps fewer bytes. With --host, which times the host of a GPU, it has fewer operations.
    """
    for options, saved in ((["--sizes", "3-2:16:64"], "kept_mib"), (["--host", "--sizes", "2-1:16:64"], "operations")):
        speed.main([*options, "--pairs", "1", "--csv", f"{tmp_path}/speed.csv"])
        rows = {row["method"]: row for row in kept(tmp_path / "speed.csv")}
        printed = re.findall(r"^(\S+) +[23] +[12] ", capsys.readouterr().out, re.M)
        assert list(rows) == ["stock", "pre-ln", "plain", "fast"] == printed
        assert rows["stock"]["step"] == "1.0" and all(float(row["step_ms"]) > 0 for row in rows.values())
        assert all(0 < float(rows["fast"][name]) < float(rows["plain"][name]) for name in ("waits", saved))
    assert torch.ones(1).is_cpu and not Fast.gpu_code


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
