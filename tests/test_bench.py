"""recipes/research/bench: do they measure and report? (Not how fast: a timed test would fail on a busy machine.)"""

from __future__ import annotations

import csv
import gc
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, make_environment
from recorded import recording_without_gpu
from reference import batch, build
from torch.utils.flop_counter import FlopCounterMode

from fairseq_admin.fast.plain import Fast
from recipes.research.bench import attached, gpu, replay, speed, trial
from recipes.research.bench.counting import counts
from recipes.research.bench.gpu import training_flops, utilisation
from recipes.research.bench.step import read_lengths


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


def test_reports_the_cost_of_an_attached_bert(tmp_path: Path) -> None:
    attached.main(["--layers", "2", "--width", "64", "--pairs", "1", "--csv", f"{tmp_path}/attached.csv"])
    (row,) = kept(tmp_path / "attached.csv")
    assert row["width"] == "64" and float(row["step_low"]) <= float(row["step"]) <= float(row["step_high"])


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


def test_flops_are_those_of_the_products() -> None:
    """Is the count that of torch for a forward and a backward?"""
    sizes = {"encoder_layers": 3, "decoder_layers": 2, "dropout": 0.0, "attention_dropout": 0.0}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_embed_dim": 32, f"{side}_ffn_embed_dim": 48, f"{side}_attention_heads": 4}
    model = build("transformer_admin", admin_fast="on", admin_init="log", **sizes)
    src, lengths, prev = batch(4, 19, 17)
    with FlopCounterMode(display=False) as counter:
        model(src, lengths, prev)[0].sum().backward()
    expected = training_flops(4, 19, 17, layers=(3, 2), width=32, ffn=48, words=104)
    assert counter.get_total_flops() == expected
    assert utilisation(989e12, 2, "NVIDIA H100 80GB HBM3") == 0.5 and utilisation(1, 1, "CPU") is None


def test_the_trial_begins_with_what_shows_most() -> None:
    names = trial.names_for(("fp16", "bf16"))
    assert names[:4] == ["ceilings", "text-readme-fp16", "text-stock-adamw-fp16", "memory-fp16"]


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("DEVICE=cuda", "This machine has no GPU that torch can use; DEVICE=cpu tries the trial itself.\n"),
        ("DEVICE=tpu", "DEVICE=tpu is unknown; expected cuda or cpu.\n"),
        ("MINUTES=9", "MINUTES=9 is not a setting of gpu-trial."),
    ],
)
def test_a_trial_refuses_in_one_line(word: str, line: str, tmp_path: Path) -> None:
    """Are mistakes refused in one line before any work, as make passes them on?"""
    name, _, value = word.partition("=")
    more = make_environment(MAKEFLAGS=f" -- {word} RUNS={tmp_path}/runs", **{name: value, "RUNS": f"{tmp_path}/runs"})
    command = [sys.executable, "-m", "recipes.research.bench.trial"]
    done = subprocess.run(command, cwd=ROOT, env=more, capture_output=True, text=True)
    assert done.returncode == 2 and not (tmp_path / "runs").exists()
    assert done.stderr.startswith(line) and done.stderr.count("\n") == 1


MULTI30K = "multi30k", "8192"
ROWS = {
    "ceilings": ["copy", "product", "product"],
    **{f"{method}-fp32": [method] for method in ("fast", "stock", "plain", "stock-adamw", "graph")},
    **{f"text-{method}-fp32": [f"{method}, text"] * 2 for method in ("readme", "stock-adamw")},
    "memory-fp32": ["memory"] * 3,
    **{f"bert-{method}": [f"bert {method}"] for method in ("stock", "attached", "compiled")},
}
"""The rows of each measurement on a CPU."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if "compiled" in name else pytest.mark.slow) for name in ROWS]
)
def test_every_measurement_writes_its_rows(name: str, tmp_path: Path) -> None:
    """Does every measurement succeed, write rows with min ≤ time ≤ max, and update the weights?"""
    assert set(ROWS) == set(trial.names_for(trial.PRECISIONS["cpu"]))
    trial.measure(tmp_path, [name])
    log = (tmp_path / f"{name}.log").read_text()
    assert log.endswith(f"\n{trial.DONE}\n"), log[-3000:]
    rows = kept(tmp_path / "rows.csv")
    assert [row["what"] for row in rows] == ROWS[name]
    assert all(0 < float(row["low"]) <= float(row["ms"]) <= float(row["high"]) for row in rows)
    if {"updates", "step_gib"} <= rows[0].keys():
        assert rows[0]["updates"] == "9" and float(rows[0]["tflops"]) > 0 and rows[0]["mfu"] == ""


def test_recorded_steps_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Do the measurements of --admin-fast graph say how many steps were replayed, and how many shapes were recorded?"""
    with recording_without_gpu():
        gpu.over_text("readme", "fp32")
        gpu.memory("fp32")
    rows = [json.loads(line.removeprefix("row: ")) for line in capsys.readouterr().out.splitlines() if "row: " in line]
    first, second, *memory = rows
    assert first["steps"] == second["steps"] and 0 <= first["replayed"] < second["replayed"] == 1
    assert second["updates"] == 2 * first["updates"] > 20
    assert [row["shapes"] for row in memory] == [0, 1, 6]


def test_the_share_of_replayed_steps_is_the_kept_one() -> None:
    """Does the command give the kept row? It has fairseq's own trainer make the batches."""
    (row,) = [row for row in kept(ROOT / "docs/rows/bench/replay.csv") if (row["text"], row["max_tokens"]) == MULTI30K]
    found = replay.row_of("multi30k", 8192)
    assert {name: str(value) for name, value in found.items()}.items() <= row.items()
    assert found["second_epoch"] == 1 and found["first_epoch"] > 0.8


def test_lengths_of_a_text(corpus: Path) -> None:
    """Are the lengths those of fairseq's files? Is a wrong folder refused in one line?"""
    lengths = read_lengths(str(corpus))
    lines = [(corpus.parent / f"train.{side}").read_text().splitlines() for side in "ab"]
    assert lengths.tolist() == [[len(a.split()) + 1, len(b.split()) + 1] for a, b in zip(*lines)]
    assert len(read_lengths("iwslt14")) == 160239 and len(read_lengths("multi30k")) == 29000
    with pytest.raises(ValueError, match="expected one, or iwslt14, multi30k"):
        read_lengths(str(corpus.parent))


def test_a_trial_repeats_only_what_did_not_succeed_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Are failed measurements made again, and succeeded ones too, on another card? Are rows of a failed one kept?"""
    monkeypatch.setattr(trial, "machine", lambda: {"device": "this card"})
    script = "#!/bin/sh\necho $3 >> {0}/calls\necho 'row: {{\"what\": \"'$3'\"}}'\ntest $3 = good\n"
    (tmp_path / "python").write_text(script.format(tmp_path))
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", f"{tmp_path}/python")
    for _ in range(2):
        trial.measure(tmp_path, ["good", "bad"])
    assert (tmp_path / "calls").read_text().split() == ["good", "bad", "bad"]
    assert (tmp_path / "rows.csv").read_text() == "what,device\ngood,this card\nbad,this card\n"
    monkeypatch.setattr(trial, "machine", lambda: {"device": "another card"})
    trial.measure(tmp_path, ["good"])
    assert (tmp_path / "rows.csv").read_text() == "what,device\ngood,another card\n"
