"""Both language models under fairseq's commands: train, resume, evaluate, generate, fold; and refusals."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import conftest
import language
import pytest
from kinds import assert_equal

from fairseq_admin import cli
from fairseq_admin.architectures.language_model import TransformerLMAdminModel
from fairseq_admin.architectures.masked_language_model import MaskedLMAdminModel
from fairseq_admin.checkpoints import files
from fairseq_admin.method import provenance, state_dict

COMMON = (
    "--user-dir fairseq_admin --optimizer radam --lr 1e-3 --lr-scheduler inverse_sqrt --warmup-updates 10 "
    "--max-tokens 300 --tokens-per-sample 30 --sample-break-mode complete --cpu --no-epoch-checkpoints "
    "--log-format simple --log-interval 1 --num-workers 0"
).split()
LANGUAGE = [*COMMON, *"--task language_modeling --arch transformer_lm_admin_tiny --criterion cross_entropy".split()]
TRAIN = {
    "language": [*LANGUAGE, "--share-decoder-input-output-embed"],
    "masked": [*COMMON, *"--task masked_lm --arch masked_lm_admin_tiny --criterion masked_lm".split()],
}
EVAL = "--gen-subset valid --max-tokens 300 --tokens-per-sample 30 --sample-break-mode complete --cpu".split()
EVAL += ["--num-workers", "0"]  # eval_lm would leave a process that loads batches
ADAPTIVE = (
    "--adaptive-input --adaptive-input-cutoff 15,30 --adaptive-softmax-cutoff 15,30 --tie-adaptive-weights "
    "--tie-adaptive-proj --criterion adaptive_loss --ddp-backend legacy_ddp"
)
"""With these options, the output matrix is not tied to the input embedding."""


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language.binarised(tmp_path_factory.mktemp("words"))


train = functools.partial(conftest.train, options=TRAIN["language"])


def last(folder: Path) -> dict[str, Any]:
    return files.read(folder / "checkpoint_last.pt")["model"]


def main(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def trained(words: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short language model run's last.pt, an earlier checkpoint, and folded.pt."""
    folder = tmp_path_factory.mktemp("trained")
    train(words, folder, "--max-epoch", 6, "--save-interval-updates", 30, "--keep-interval-updates", 1)
    os.rename(folder / "checkpoint_last.pt", folder / "last.pt")
    assert main("fold", folder / "last.pt", "-o", folder / "folded.pt", "--data", words) == 0
    return folder


@pytest.fixture(scope="module")
def masked(words: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoint_1_3.pt and checkpoint_last.pt of six updates of the masked language model."""
    folder = tmp_path_factory.mktemp("masked")
    quick = ["--disable-validation", "--max-update", 6, "--save-interval-updates", 3]
    train(words, folder, *quick, options=TRAIN["masked"])
    return folder


MODES = {
    "language": "",
    "adaptive, in half precision": f"{ADAPTIVE} --memory-efficient-fp16",
    "embedding norm and constant": "--layernorm-embedding --admin-init constant",
    "masked": "",
}


@pytest.mark.parametrize("name", MODES)
def test_omega_is_profiled_and_a_stopped_run_resumes_and_folds(name: str, words: Path, tmp_path: Path) -> None:
    """Is ω in the checkpoint and profiled once, does a stopped run resume bit for bit, and does it fold?"""
    base = LANGUAGE if "adaptive" in name else TRAIN["masked" if name == "masked" else "language"]
    options = ["--disable-validation", "--max-update", 9, *MODES[name].split()]
    whole = train(words, tmp_path / "whole", *options, "--save-interval-updates", 7, options=base)
    state = last(tmp_path / "whole")
    (omegas,) = state_dict.omegas(state).values()
    record, measured = provenance.decode(state[provenance.KEY]), "constant" not in name
    assert whole.output.count("profiled by rule") == measured and len(omegas) == 4
    assert record["rule"] == ("reference" if measured else "constant")
    if measured:
        first, *others = [omega.mean().item() for omega in omegas.values()]
        assert first == 1 and others[1] > 1.05 and 100 < record["tokens"] <= 300
    saved = tmp_path / "whole/checkpoint_1_7.pt"
    resumed = conftest.resume(words, saved, tmp_path / "resumed", *options, options=base)
    assert "7 updates" in resumed.output and "profiled by rule" not in resumed.output
    assert_equal(last(tmp_path / "resumed"), state)
    if name != "masked":  # `fold` itself compares the functions
        path = tmp_path / "whole/checkpoint_last.pt"
        assert main("fold", path, "-o", tmp_path / "f.pt", "--data", words) == 0


def perplexity(output: str) -> float:
    return float(re.search(r"Perplexity: ([0-9.]+)", output)[1])


def test_eval_lm_with_and_without_the_plugin(words, trained, without_plugin, tmp_path, run) -> None:
    """Does stock fairseq-eval-lm give the folded model the unfolded model's perplexity?"""
    ours = run("fairseq_cli.eval_lm", words, "--user-dir", "fairseq_admin", "--path", trained / "last.pt", *EVAL)
    assert ours.status == 0, ours.output[-3000:]
    command = [sys.executable, "-m", "fairseq_cli.eval_lm", words, "--path", trained / "folded.pt", *EVAL]
    stock = subprocess.run(command, env=without_plugin, cwd=tmp_path, capture_output=True, text=True)
    assert stock.returncode == 0, stock.stderr[-3000:]
    # fairseq prints two decimals.
    assert perplexity(ours.output) == pytest.approx(perplexity(stock.stdout + stock.stderr), abs=0.011)


def test_generate_continues_a_text(words: Path, trained: Path, tmp_path: Path) -> None:
    """Does fairseq-generate continue a text? (It imports numpy.compat, which numpy 2 no longer has.)"""
    options = ["--task", "language_modeling", "--prefix-size", 2, *EVAL[2:]]
    continued = conftest.generate(words, trained / "last.pt", *options, log=tmp_path / "log")
    # 20 sentences in blocks of up to 30 words.
    assert len(continued) == 10 and all(re.match(r"w\d+ w\d+", text) for text, _ in continued.values())


def test_from_pretrained_loads_a_profiled_model(words: Path, trained: Path, masked: Path) -> None:
    hub = TransformerLMAdminModel.from_pretrained(str(trained), "last.pt", str(words))
    assert type(hub.models[0]) is TransformerLMAdminModel and hub.models[0].profiled
    assert hub.sample("w1 w4", beam=2, max_len_b=8).startswith("w1 w4")
    assert hub.score("w1 w4 w7")["positional_scores"].isfinite().all()
    roberta = MaskedLMAdminModel.from_pretrained(str(masked), "checkpoint_last.pt", str(words), bpe=None)
    assert type(roberta.model) is MaskedLMAdminModel and roberta.model.profiled
    features = roberta.extract_features(roberta.task.source_dictionary.encode_line("w1 w4 w7").long())
    assert features.shape == (1, 4, 64) and features.isfinite().all()


@pytest.mark.parametrize("scheme", ["deepnorm", "fixup"])
def test_other_schemes_train_and_fold_or_are_refused(scheme: str, words: Path, tmp_path: Path, capsys) -> None:
    """Does a model of another scheme train, and then fold to a file for stock fairseq or get refused?"""
    train(words, tmp_path, "--disable-validation", "--admin-scheme", scheme, "--max-update", 2)
    capsys.readouterr()
    status = main("fold", tmp_path / "checkpoint_last.pt", "-o", tmp_path / "f.pt", "--data", words)
    out, err = capsys.readouterr()
    if scheme == "fixup":
        assert status == 2 and f"--admin-scheme {scheme}, whose layers no stock Transformer has" in err
        return
    assert status == 0 and f"{tmp_path / 'f.pt'}: transformer_lm, fp32; log-probabilities of" in out, err
    state = files.read(tmp_path / "f.pt")
    assert state["args"]["arch"] == "transformer_lm" and not [name for name in state["args"] if "admin" in name]
    assert not [key for key in state["model"] if re.search("omega|scale|admin", key)]
