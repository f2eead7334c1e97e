"""The masked language model under fairseq's commands: trained, resumed, validated, averaged; and its refusals."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import language
import pytest
from conftest import Run, run_module
from test_modes import same

from fairseq_admin import cli
from fairseq_admin.architectures.masked_language_model import MaskedLMAdminModel
from fairseq_admin.checkpoints.files import read
from fairseq_admin.method import provenance, state_dict

TRAIN = (
    "--user-dir fairseq_admin --task masked_lm --arch masked_lm_admin_tiny --optimizer radam --lr 1e-3 "
    "--lr-scheduler inverse_sqrt --warmup-updates 10 --criterion masked_lm --max-tokens 300 --tokens-per-sample 30 "
    "--sample-break-mode complete --cpu --no-epoch-checkpoints --log-format simple --log-interval 1 --num-workers 0"
).split()


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language.binarised(tmp_path_factory.mktemp("words"))


def train(data: Path, folder: Path, *arguments: object) -> Run:
    """Train, or resume, in a folder; fails the test if the command fails."""
    folder.mkdir(exist_ok=True)
    log = folder / f"log{len(list(folder.glob('log*')))}"
    done = run_module("fairseq_cli.train", data, *TRAIN, "--save-dir", folder, *arguments, log=log)
    assert done.status == 0, done.output[-4000:]
    return done


@pytest.fixture(scope="module")
def trained(words: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoint_1_7.pt and checkpoint_last.pt, of ten updates, and the run's log0."""
    folder = tmp_path_factory.mktemp("trained")
    train(words, folder, "--disable-validation", "--max-update", 10, "--save-interval-updates", 7)
    return folder


def last(folder: Path) -> dict[str, Any]:
    return read(folder / "checkpoint_last.pt")["model"]


def test_profiled_once_and_resumed_bit_for_bit(words: Path, trained: Path, tmp_path: Path) -> None:
    state = last(trained)
    assert (trained / "log0").read_text().count("Admin: profiled by rule reference on") == 1
    first = [omega.mean().item() for omega in state_dict.omegas(state)["encoder"].values()]
    assert len(first) == 4 and first[0] == 1 and first[2] > 1.1
    record = provenance.decode(state[provenance.KEY])
    assert record["rule"] == "reference" and 100 < record["tokens"] <= 300
    shutil.copy(trained / "checkpoint_1_7.pt", tmp_path / "checkpoint_last.pt")
    resumed = train(words, tmp_path, "--disable-validation", "--max-update", 10)
    assert "7 updates" in resumed.output and "profiled by rule" not in resumed.output
    assert same(last(tmp_path), state)


def test_it_learns_and_is_validated(words: Path, tmp_path: Path, run) -> None:
    done = train(words, tmp_path, "--max-epoch", 12, "--lr", 3e-3, "--max-tokens", 600)
    losses = [float(found) for found in re.findall(r"valid on 'valid' subset \| .*?loss ([0-9.]+)", done.output)]
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.2, losses
    given = ["--user-dir", "fairseq_admin", "--path", tmp_path / "checkpoint_last.pt", "--task", "masked_lm", "--cpu"]
    again = run("fairseq_cli.validate", words, *given, "--max-tokens", 600, "--num-workers", 0)
    assert again.status == 0, again.output[-3000:]
    found = re.search(r"valid on 'valid' subset \| .*?loss ([0-9.]+)", again.output)[1]
    assert float(found) == pytest.approx(losses[-1], abs=0.3)  # other words are masked


def test_omega_and_average(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    both = [str(trained / name) for name in ("checkpoint_1_7.pt", "checkpoint_last.pt")]
    assert cli.main(["average", *both, "-o", str(tmp_path / "a.pt")]) == 0
    capsys.readouterr()
    assert cli.main(["omega", str(tmp_path / "a.pt"), "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert [row["sublayer"] for row in table["encoder"]] == ["self_attn", "ffn"] * 2 and "decoder" not in table
    assert table["provenance"]["rule"] == "reference"


def test_hub(words: Path, trained: Path) -> None:
    hub = MaskedLMAdminModel.from_pretrained(str(trained), "checkpoint_last.pt", str(words), bpe=None)
    assert type(hub.model) is MaskedLMAdminModel and hub.model.profiled
    features = hub.extract_features(hub.task.source_dictionary.encode_line("w1 w4 w7").long())
    assert features.shape == (1, 4, 64) and features.isfinite().all()


VERBS = [
    ["fold", "-o", "out"],
    ["export", "--to", "ctranslate2", "-o", "out"],
    ["export", "--to", "huggingface", "-o", "out"],
]


@pytest.mark.parametrize("verb", [*VERBS, ["translate"]])
def test_what_it_is_not_is_one_line(verb, trained, tmp_path, capsys, monkeypatch) -> None:
    if "ctranslate2" in verb:
        pytest.importorskip("ctranslate2", reason="its lack is told first")
    if "huggingface" in verb:
        pytest.importorskip("transformers", reason="its lack is told first")
    monkeypatch.chdir(tmp_path)
    assert cli.main([verb[0], str(trained / "checkpoint_last.pt"), *verb[1:]]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fairseq-admin: ") and error.count("\n") == 1, error
    assert "masked_lm" in error and not (tmp_path / "out").exists()


def test_refusals(words: Path, trained: Path, tmp_path: Path, run) -> None:
    """Is a user's mistake one line and status 2?"""
    given = [words, *TRAIN, "--save-dir", tmp_path, "--max-update", 1]
    for more, said in (
        (["--encoder-normalize-before"], "--encoder-normalize-before was given"),
        (["--restore-file", trained / "checkpoint_last.pt", "--encoder-layers", 3], "the checkpoint's encoder has 2"),
    ):
        done = run("fairseq_cli.train", *given, *more)
        end = done.output.splitlines()[-1]
        assert done.status == 2 and end.startswith("fairseq-admin: ") and said in end, done.output[-3000:]
    assert not list(tmp_path.glob("*.pt"))


@pytest.mark.parametrize("scheme", ["deepnorm", "pre-ln", "fixup"])
def test_other_schemes_train_and_resume(scheme: str, words: Path, tmp_path: Path) -> None:
    """Chosen on the command line; like roberta_prenorm, Pre-LN has no norm after its embedding."""
    train(words, tmp_path, "--disable-validation", "--admin-scheme", scheme, "--max-update", 2)
    done = train(words, tmp_path, "--disable-validation", "--admin-scheme", scheme, "--max-update", 4)
    assert "2 updates" in done.output and state_dict.scheme(last(tmp_path)) == scheme
    named = any("layernorm_embedding" in key for key in last(tmp_path))
    assert named == (scheme != "pre-ln")
