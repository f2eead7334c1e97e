"""The README's commands on a small model, run in a shell as a new user would."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from pages import README, blocks, commands

from fairseq_admin.text.tokens import Text

SMALL = (
    "--cpu --encoder-layers 2 --decoder-layers 2 --encoder-embed-dim 32 --encoder-ffn-embed-dim 64 "
    "--encoder-attention-heads 2 --decoder-attention-heads 2 --max-tokens 300 --max-epoch 3 --num-workers 0 "
    "--no-last-checkpoints --disable-validation"
)
ASSETS = (
    "data-bin/dict.a.txt",
    "data-bin/dict.b.txt",
    "runs/demo/text-1a2b3c4d/codes",
    "runs/demo/text-1a2b3c4d/text.json",
)


@pytest.fixture
def checkout(corpus: Path, tmp_path: Path) -> Path:
    """A folder that looks like a checkout to the README's commands: environment, plugin, data and the demo's run."""
    data = tmp_path / "runs" / "demo" / "text-1a2b3c4d"
    run = tmp_path / "runs" / "demo" / "admin-s1"
    for folder in (data, run / "at-700" / "model", tmp_path / "checkpoints" / "admin-18l"):
        folder.mkdir(parents=True)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "fairseq_admin").symlink_to(ROOT / "fairseq_admin")
    (tmp_path / "data-bin").symlink_to(corpus)
    (data / "bin").symlink_to(corpus)
    (run / "checkpoints").symlink_to(tmp_path / "checkpoints" / "admin-18l")
    # With these merges, every word from w0 to w39 is one unit.
    merges = [f"w {n}</w> 1" for n in range(10)]
    merges += [line for tens in range(1, 4) for line in (f"w {tens} 1", *(f"w{tens} {n}</w> 1" for n in range(10)))]
    (data / "codes").write_text("\n".join(merges) + "\n")
    (data / "text.json").write_text(json.dumps(dataclasses.asdict(Text("a", "b", escape=True))))
    return tmp_path


def shell(script: str, folder: Path) -> list[str]:
    """Run a script, which must succeed. Returns its standard output."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    process = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, f"{script}\n{process.stdout[-3000:]}{process.stderr[-3000:]}"
    return process.stdout.splitlines()


@pytest.mark.nightly
def test_readme_runs(checkout: Path) -> None:
    """Do the README's commands train, average, fold and translate a small model?"""
    text = README.read_text(encoding="utf-8")
    (block,) = (block for block in blocks(text) if "fairseq-train" in block)
    activate, train, average, fold, generate = commands(block)
    assert "--fp16" in train and "On a CPU, `--cpu` replaces `--fp16`" in text
    shell(f"{activate}\n{train.replace('--fp16', SMALL)}", checkout)
    averaged, folded, *translations = shell("\n".join([activate, average, fold, f"{generate} --cpu"]), checkout)
    assert averaged.startswith("average.pt: average of checkpoint1.pt, checkpoint2.pt, checkpoint3.pt")
    assert folded.startswith("model.pt: transformer_wmt_en_de, fp32; log-probabilities of ")
    assert any(line.startswith("H-") for line in translations)

    model = checkout / "runs" / "demo" / "admin-s1" / "at-700" / "model"
    for file in ("model.pt", *ASSETS):
        (model / Path(file).name).symlink_to((checkout / file).resolve())
    (recipe,) = (block for block in blocks(text) if block.startswith("make demo"))
    _, one_sentence = commands(recipe)
    assert shell(one_sentence, checkout)
