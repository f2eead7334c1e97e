"""A folded model in stock fairseq: without the plugin, it translates as the unfolded model does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import SEARCH, TRAIN, generate, hypotheses, train
from reference import TINY

from fairseq_admin import cli


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short run's last.pt, and its folded.pt."""
    folder = tmp_path_factory.mktemp("trained")
    train(corpus, folder, "--max-epoch", 3)
    os.rename(folder / "checkpoint_last.pt", folder / "last.pt")
    command = ["fold", str(folder / "last.pt"), "-o", str(folder / "folded.pt"), "--data", str(corpus)]
    assert cli.main(command) == 0
    return folder


@pytest.fixture(scope="module")
def unfolded(corpus: Path, trained: Path) -> dict[int, tuple[str, float]]:
    """The unfolded model's hypotheses for the test set."""
    return generate(corpus, trained / "last.pt", log=trained / "generate.log")


@pytest.mark.parametrize(
    ("command", "options"),
    [("generate", ["--gen-subset", "test"]), ("interactive", ["--buffer-size", 20, "--max-tokens", 1000])],
)
def test_stock_fairseq_translates_as_the_unfolded_model(
    command, options, corpus, trained, unfolded, without_plugin, tmp_path
):
    sources = (corpus.parent / "test.a").read_text()
    arguments = [corpus, "--path", trained / "folded.pt", *options, *SEARCH]
    line = [sys.executable, "-m", f"fairseq_cli.{command}", *map(str, arguments)]
    result = subprocess.run(line, env=without_plugin, cwd=tmp_path, input=sources, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    # Log-probabilities may differ by 1e-5 per word, of at most 20.
    expected = {number: (text, pytest.approx(score, abs=1e-4)) for number, (text, score) in unfolded.items()}
    assert len(expected) == 20 and hypotheses(result.stdout) == expected


def test_stock_fairseq_trains_the_folded_model_on(corpus: Path, trained: Path, tmp_path: Path) -> None:
    """Stock fairseq-train continues from the folded weights: its first loss is near the last, not the initial, loss."""
    sizes = [f"--{name.replace('_', '-')}={size}" for name, size in TINY.items()]
    options = [option for option in TRAIN if option not in ("--user-dir", "fairseq_admin")]
    options[options.index("transformer_admin_tiny")] = "transformer"
    options[options.index("radam")] = "adam"
    finetune = ["--finetune-from-model", trained / "folded.pt", "--max-update", 1]
    run = train(corpus, tmp_path, *sizes, *finetune, options=options)
    loss = float(re.search(r"train_inner \| .*?loss=([0-9.]+)", run.output)[1])
    losses = [float(loss_text) for loss_text in re.findall(r"loss=([0-9.]+)", (trained / "log0").read_text())]
    assert abs(loss - losses[-1]) < 0.3 < losses[0] - losses[-1]
