"""Does an interrupted training end where an uninterrupted one does, bit for bit?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import TRAIN

from recipes import recipe
from recipes.translation import Translation


def batches() -> list[str]:
    """The option that recipes give fairseq-train for its batches."""
    words = Translation(recipe.read("demo", {})).optimisation()
    place = words.index("--update-epoch-batch-itr")
    return words[place : place + 2]


def state(path: Path) -> dict[str, torch.Tensor]:
    """The weights and what RAdam remembers, by name."""
    saved = torch.load(path, weights_only=False)
    memory = saved["last_optimizer_state"]["state"]
    return saved["model"] | {f"{n}.{name}": torch.as_tensor(value) for n in memory for name, value in memory[n].items()}


@pytest.mark.slow
def test_resumed_is_uninterrupted(run, corpus, tmp_path):
    """Stopped in the middle of epochs 1, 2 and 3, of some 15 updates each, and gone on with."""
    options = [
        corpus,
        *TRAIN,
        *batches(),
        "--disable-validation",
        "--save-interval-updates",
        "7",
        "--log-interval",
        "50",
    ]

    def train(folder: str, updates: int, *more: object) -> None:
        done = run("fairseq_cli.train", *options, "--save-dir", tmp_path / folder, "--max-update", updates, *more)
        assert done.status == 0, done.output

    train("whole", 42)
    saved = {int(path.stem.rpartition("_")[2]): path.name for path in (tmp_path / "whole").glob("checkpoint_*_*.pt")}
    newest = "none"
    for updates, epoch in ((7, 1), (21, 2), (35, 3), (42, 3)):
        train("parts", updates, "--restore-file", newest)
        assert saved[updates] == f"checkpoint_{epoch}_{updates}.pt"
        newest = tmp_path / "parts" / saved[updates]
        whole, parts = state(tmp_path / "whole" / saved[updates]), state(newest)
        assert whole.keys() == parts.keys()
        assert [name for name in whole if not torch.equal(whole[name], parts[name])] == [], updates
