"""New layers on a pre-trained encoder under fairseq's commands: pre-trained, trained, killed, resumed, validated."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import deeper
import pytest
import torch
from conftest import Run, run_module
from test_modes import read, same

from fairseq_admin import cli
from fairseq_admin.method import provenance

COMMON = (
    "--user-dir fairseq_admin --max-tokens 300 --cpu --no-epoch-checkpoints --log-format simple --log-interval 1 "
    "--num-workers 0 --lr 1e-3 --lr-scheduler fixed --disable-validation"
).split()
WORDS = (
    "--task masked_lm --arch masked_lm_admin_tiny --optimizer radam --criterion masked_lm --tokens-per-sample 30 "
    "--sample-break-mode eos --max-update 5"
).split()
CLASSES = (
    "--task sentence_prediction --arch deeper_admin_tiny --optimizer radam --criterion sentence_prediction "
    "--num-classes 2 --max-positions 30 --more-layers 2 --more-scheme dt-fixup"
).split()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deeper.binarised(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def encoder(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of `masked_lm_admin`, of Admin's scheme."""
    folder = tmp_path_factory.mktemp("encoder")
    train(data, folder, *WORDS)
    return folder / "checkpoint_last.pt"


def train(data: Path, folder: Path, *arguments: object, status: int = 0) -> Run:
    folder.mkdir(exist_ok=True)
    log = folder / f"log{len(list(folder.glob('log*')))}"
    done = run_module("fairseq_cli.train", data, *COMMON, "--save-dir", folder, *arguments, log=log)
    assert done.status == status, done.output[-4000:]
    return done


@pytest.fixture(scope="module")
def trained(data: Path, encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoint_1_3.pt and checkpoint_last.pt, of six updates, and the run's log0."""
    folder = tmp_path_factory.mktemp("trained")
    how = ["--finetune-from-model", encoder, "--max-update", 6, "--save-interval-updates", 3]
    train(data, folder, *CLASSES, *how)
    return folder


def test_measured_once_and_resumed_bit_for_bit(data: Path, encoder: Path, trained: Path, tmp_path: Path) -> None:
    state = read(trained / "checkpoint_last.pt")["model"]
    log = (trained / "log0").read_text()
    (said,) = re.findall(r"Admin: the largest norm of the encoder's output \(mu\) on 120 sentences .*: ([0-9.]+)", log)
    record = provenance.decode(state["more.admin_provenance"])
    assert record["mu"] == pytest.approx(float(said), rel=1e-3) and record["sentences"] == 120
    assert log.index("(mu)") < log.index("num_updates=1,")
    shutil.copy(trained / "checkpoint_1_3.pt", tmp_path / "checkpoint_last.pt")
    again = train(data, tmp_path, *CLASSES, "--finetune-from-model", encoder, "--max-update", 6)
    assert "3 updates" in again.output and "(mu)" not in again.output
    assert same(read(tmp_path / "checkpoint_last.pt")["model"], state)


def test_a_frozen_encoder_does_not_move(data: Path, encoder: Path, tmp_path: Path) -> None:
    """Is the encoder the checkpoint's, bit for bit, with any optimizer, while the new layers have moved?"""
    how = [*CLASSES, "--pretrained-lr-factor", 0, "--optimizer", "adam", "--finetune-from-model", encoder]
    states = []
    for updates in (1, 3):
        train(data, tmp_path / str(updates), *how, "--max-update", updates)
        states.append(read(tmp_path / str(updates) / "checkpoint_last.pt")["model"])
    before = read(encoder)["model"]
    frozen = [key for key in before if key.startswith("encoder.")]
    assert len(frozen) > 30 and all(torch.equal(states[1][key], before[key]) for key in frozen)
    moved = [key for key in states[0] if key.endswith("weight") and not torch.equal(states[0][key], states[1][key])]
    assert all(key.startswith(("more.", "classification_heads.")) for key in moved) and len(moved) == 14


def test_validated_and_shown(data: Path, trained: Path, tmp_path: Path, run, capsys: pytest.CaptureFixture) -> None:
    path = trained / "checkpoint_last.pt"
    given = ["--user-dir", "fairseq_admin", "--path", path, "--task", "sentence_prediction", "--num-classes", 2]
    given += ["--criterion", "sentence_prediction", "--num-workers", 0]
    done = run("fairseq_cli.validate", data, *given, "--max-positions", 30, "--cpu", "--max-tokens", 300)
    assert done.status == 0 and "accuracy" in done.output, done.output[-3000:]
    both = [str(trained / name) for name in ("checkpoint_1_3.pt", "checkpoint_last.pt")]
    assert cli.main(["average", *both, "-o", str(tmp_path / "a.pt")]) == 0
    assert cli.main(["omega", str(tmp_path / "a.pt")]) == 0
    assert "encoder" in capsys.readouterr().out
    assert cli.main(["translate", str(path)]) == 2


def test_refusals(data: Path, encoder: Path, tmp_path: Path) -> None:
    """Is a user's mistake one line and status 2?"""
    for more, said in (
        ([*CLASSES], "has no pre-trained encoder"),
        ([*CLASSES, "--finetune-from-model", encoder, "--optimizer", "adam"], "the optimizer has one rate for all"),
        ([*CLASSES, "--finetune-from-model", encoder, "--encoder-embed-dim", 32], "vocabulary and width are"),
        ([*WORDS, "--admin-scheme", "dt-fixup"], "--admin-scheme dt-fixup was given, which is for new layers"),
        ([*WORDS, "--arch", "deeper_admin_tiny"], "which has no classification head"),
    ):
        done = train(data, tmp_path, *more, "--max-update", 1, status=2)
        end = done.output.splitlines()[-1]
        assert end.startswith("fairseq-admin: ") and said in end, done.output[-3000:]
    assert not list(tmp_path.glob("checkpoint*.pt"))
