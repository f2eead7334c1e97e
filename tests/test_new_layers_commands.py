"""New layers under fairseq's commands: pre-train, train, kill, resume and validate."""

from __future__ import annotations

import functools
import re
import shutil
from pathlib import Path

import conftest
import new_layers
import pytest
import torch
from conftest import Completed
from test_modes import same

from fairseq_admin import cli
from fairseq_admin.checkpoints.files import read
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


train = functools.partial(conftest.train, options=COMMON)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_layers.binarised(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def encoder(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of `masked_lm_admin` with scheme admin."""
    folder = tmp_path_factory.mktemp("encoder")
    train(data, folder, *WORDS)
    return folder / "checkpoint_last.pt"


def six_updates(data: Path, encoder: Path, folder: Path) -> Completed:
    """Train or resume with Adam, which moves at once. Leaves checkpoint_1_3.pt and checkpoint_last.pt."""
    options = ["--finetune-from-model", encoder, "--max-update", 6, "--save-interval-updates", 3]
    return train(data, folder, *CLASSES, "--optimizer", "adam_by_group", *options)


@pytest.fixture(scope="module")
def trained(data: Path, encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with log0 and the checkpoints of a run with new DT-Fixup layers."""
    folder = tmp_path_factory.mktemp("trained")
    six_updates(data, encoder, folder)
    return folder


MEASURED = r"Admin: on ([0-9]+) sentences in evaluation mode in .* s: (.*) ([0-9.]+)"


def test_measured_once_and_resumed_bit_for_bit(data: Path, encoder: Path, trained: Path, tmp_path: Path) -> None:
    """Is the measurement logged once, before the first update, and does a resumed run equal one without a stop?"""
    state, log = read(trained / "checkpoint_last.pt")["model"], (trained / "log0").read_text()
    ((sentences, quantity, value),) = re.findall(MEASURED, log)
    record = provenance.decode(state["more.admin_provenance"])
    assert record["sentences"] == int(sentences) == 120 and log.index(quantity) < log.index("num_updates=1,")
    assert quantity.endswith("(mu)") and record["mu"] == pytest.approx(float(value), rel=1e-3)
    tmp_path.joinpath("resumed").mkdir()
    shutil.copy(trained / "checkpoint_1_3.pt", tmp_path / "resumed/checkpoint_last.pt")
    resumed = six_updates(data, encoder, tmp_path / "resumed")
    assert "3 updates" in resumed.output and not re.search(MEASURED, resumed.output)
    assert same(read(tmp_path / "resumed/checkpoint_last.pt")["model"], state)


def test_half_precision_trains_the_scaled_weights(data: Path, encoder: Path, tmp_path: Path) -> None:
    """Is the largest weight a scaled Xavier weight after an update?

    The update copies the optimizer's weights to the model. (radam moves nothing before update 6.) float16 has 12 bits.
    The largest of 64 x 64 weights is at most 1 % below the bound of Xavier's law.
    """
    options = [*CLASSES, "--finetune-from-model", encoder, "--max-update", 1, "--profile-sentences", 50]
    train(data, tmp_path, *options, "--fp16", "--fp16-no-flatten-grads")
    state = read(tmp_path / "checkpoint_last.pt")["model"]
    record = provenance.decode(state["more.admin_provenance"])
    assert record["sentences"] == 50 and "on 50 sentences" in (tmp_path / "log0").read_text()
    divisor = (2 * (4 * record["mu"] ** 2 + 2 * record["mu"] + 2)) ** 0.5
    for name, share in (("fc1", 1 / divisor), ("self_attn.out_proj", 1 / divisor), ("self_attn.q_proj", 1.0)):
        weight = state[f"more.layers.1.{name}.weight"]
        assert torch.equal(weight, weight.half().float())
        assert weight.abs().max().item() == pytest.approx(share * (6 / sum(weight.shape)) ** 0.5, rel=0.015), name


def test_validated_and_shown(data: Path, trained: Path, tmp_path: Path, run, capsys: pytest.CaptureFixture) -> None:
    path = trained / "checkpoint_last.pt"
    options = ["--user-dir", "fairseq_admin", "--path", path, "--task", "sentence_prediction", "--num-classes", 2]
    options += ["--criterion", "sentence_prediction", "--num-workers", 0]
    validated = run("fairseq_cli.validate", data, *options, "--max-positions", 30, "--cpu", "--max-tokens", 300)
    assert validated.status == 0 and "accuracy" in validated.output, validated.output[-3000:]
    both = [str(trained / name) for name in ("checkpoint_1_3.pt", "checkpoint_last.pt")]
    assert cli.main(["average", *both, "-o", str(tmp_path / "a.pt")]) == 0
    capsys.readouterr()
    assert cli.main(["omega", str(tmp_path / "a.pt")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("omega: rule reference") and shown[1].startswith("new layers: scheme dt-fixup, mu ")
    assert [line.split()[0] for line in shown[3:]] == ["encoder"] * 4  # only the encoder's scheme, admin, has ω
    assert cli.main(["report", str(trained), "-o", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Admin, new layers DT-Fixup" in page and "--more-scheme" in page and "cannot be folded" in page
