"""fairseq's and our commands on one small trained run, started as from a user's shell."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from conftest import TRAIN, Completed, generate, hydra_train, train
from fairseq.models.transformer import TransformerModel

from fairseq_admin import cli
from fairseq_admin.architectures.translation_model import TransformerAdminModel
from fairseq_admin.checkpoints import files
from fairseq_admin.checkpoints.checkpoint import Checkpoint

SENTENCE = "w1 w2 w3 w4"


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two epochs (32 updates), with every epoch's checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    options = [option for option in TRAIN if option != "--no-epoch-checkpoints"]
    train(corpus, folder, "--max-epoch", 2, options=options)
    return folder


def test_generate_reads_checkpoints_ensembles_averages_and_pruned_models(
    corpus: Path, trained: Path, tmp_path: Path
) -> None:
    """Does fairseq-generate read a checkpoint, an ensemble, our average, and a decoder pruned to one layer?"""
    one, two, average = trained / "checkpoint1.pt", trained / "checkpoint2.pt", tmp_path / "average.pt"
    assert cli.main(["average", str(trained), "--last", "2", "-o", str(average)]) == 0
    pruned = ["--model-overrides", "{'decoder_layers_to_keep': '1'}"]
    models = [[two], [f"{one}{os.pathsep}{two}"], [average], [two, *pruned]]
    outputs = [tuple(generate(corpus, *model, log=tmp_path / "log").values()) for model in models]
    assert len(set(outputs)) == 4 and len(set(outputs[0])) == 20


def test_validate_gives_the_loss_of_training(
    corpus: Path, trained: Path, tmp_path: Path, run: Callable[..., Completed]
) -> None:
    """Does fairseq-validate give the loss that training printed, whatever fairseq has stored in the file?"""
    state = files.read(trained / "checkpoint2.pt")
    state["extra_state"].update({"val_loss": numpy.float64(7.0), "old": Namespace(arch="transformer_admin")})
    Checkpoint(state).write(tmp_path / "changed.pt")
    options = ["--valid-subset", "valid", "--path", tmp_path / "changed.pt", "--max-tokens", 300, "--cpu"]
    options += ["--task", "translation", "--num-workers", 0, "--user-dir", "fairseq_admin"]
    validated = run("fairseq_cli.validate", corpus, *options)
    assert validated.status == 0, validated.output[-4000:]
    printed = (trained / "log0").read_text().rsplit("valid on 'valid' subset | loss ")[-1].split()[0]
    assert f"loss {printed} " in validated.output, validated.output[-500:]


def test_hub_translates_as_generate(corpus: Path, trained: Path, tmp_path: Path) -> None:
    """Does it give the translations of fairseq-generate?"""
    hub = TransformerAdminModel.from_pretrained(str(trained), "checkpoint_last.pt", str(corpus))
    (model,) = hub.models
    assert isinstance(model, TransformerAdminModel) and model.profiled
    sentences = (corpus.parent / "test.a").read_text().splitlines()
    expected = generate(corpus, trained / "checkpoint_last.pt", log=tmp_path / "log").values()
    assert [hub.translate(sentence, beam=2, max_len_b=20) for sentence in sentences] == [text for text, _ in expected]


def test_a_folded_file_names_both_languages(
    corpus: Path, trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """Does a folded file name both languages, even if the run did not? fairseq's hub needs them to tokenise."""

    def fold(checkpoint: Path, *options: object) -> str:
        arguments = ["fold", checkpoint, "-o", tmp_path / "model.pt", *options]
        assert cli.main(list(map(str, arguments))) == 0
        return capfd.readouterr().err

    state = files.read(trained / "checkpoint2.pt")
    assert state["cfg"]["task"]["source_lang"] is None
    state["cfg"]["task"]["data"] = str(tmp_path / "gone")
    Checkpoint(state).write(tmp_path / "moved.pt")
    assert fold(trained / "checkpoint2.pt") == fold(tmp_path / "moved.pt", "--data", corpus) == ""
    hub = TransformerModel.from_pretrained(str(tmp_path), "model.pt", str(corpus), tokenizer="moses")
    assert hub.translate(SENTENCE, beam=1, max_len_b=20)
    assert "the folded file names no languages: " in fold(tmp_path / "moved.pt")


def test_hydra_takes_an_option_of_a_model_that_its_file_names(corpus: Path, tmp_path: Path) -> None:
    """Does hydra take `+model.OPTION=VALUE`? If the file names the model, hydra has no schema of its options."""
    model = "_name: transformer_admin_tiny, share_all_embeddings: true"
    run = hydra_train(corpus, tmp_path, model, override="+model.admin_init=log")
    assert run.status == 0, run.output[-4000:]
    assert Checkpoint.read(tmp_path / "checkpoint_last.pt").record["rule"] == "log"
