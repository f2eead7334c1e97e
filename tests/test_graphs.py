"""Recorded steps: which shapes of batch are recorded, what a failure leaves, the log, and resuming.

test_cuda.py compares them with computed steps on a GPU. Here a stand-in computes a replay."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import conftest
import pytest
import torch
from conftest import TRAIN
from recorded import recording_without_gpu
from test_modes import QUICK, assert_same_state, last

from fairseq_admin.fast import graphs
from fairseq_admin.fast.graphs import RecordedSteps

FAST_LOSS = "label_smoothed_cross_entropy_fast"


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the batches that were recorded, in order. Recording anything else is left out."""
    sizes: list[int] = []
    monkeypatch.setattr(graphs, "_Pair", lambda losses_of, batch, steps: sizes.append(len(batch["target"])) or object())
    return sizes


def replayed(steps: RecordedSteps, *sizes: int) -> list[bool]:
    """Whether batches of these numbers of sentences are replayed, one after the other."""
    return [steps.pair_for(lambda: None, {"target": torch.ones(size)}) is not None for size in sizes]


def test_a_shape_is_recorded_when_it_comes_again(recorded: list[int]) -> None:
    steps = RecordedSteps(torch.nn.Linear(1, 1), [])
    assert replayed(steps, 1, 2, 1, 1, 3, 2) == [False, False, True, True, False, True]
    assert recorded == [1, 2]


def test_the_rarest_shape_makes_room(recorded: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """With two pairs at most, a shape is recorded once it has come more often than one of the two."""
    monkeypatch.setattr(graphs, "MOST", 2)
    steps = RecordedSteps(torch.nn.Linear(1, 1), [])
    replayed(steps, 1, 1, 1, 2, 2)
    assert replayed(steps, 3, 3, 3) == [False, False, True] and recorded == [1, 2, 3]  # 3 times, 2 only twice
    assert replayed(steps, 1, 2, 3, 2) == [True, False, True, False]
    assert len(steps.pairs) == 2


def test_other_errors_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def pair(*_: Any) -> None:
        raise ValueError("a mistake of ours")

    monkeypatch.setattr(graphs, "_Pair", pair)
    with pytest.raises(ValueError, match="a mistake of ours"):
        replayed(RecordedSteps(torch.nn.Linear(1, 1), []), 1, 1)


def _train(arguments: list[str], log: Path) -> None:
    with recording_without_gpu():
        conftest._child("fairseq_cli.train", arguments, log)


def train(corpus: Path, folder: Path, *arguments: object) -> str:
    """Train the tiny model with recorded steps. Returns the output."""
    folder.mkdir(exist_ok=True)
    options = ["--criterion", FAST_LOSS, "--admin-fast", "graph", "--max-tokens", 100, "--log-interval", 10]
    command_line = [corpus, *TRAIN, *QUICK, *options, "--save-dir", folder, *arguments]
    done = conftest.run_process(_train, list(map(str, command_line)), log=folder / f"log{len(list(folder.iterdir()))}")
    assert done.status == 0, done.output[-4000:]
    return done.output


def shares(output: str) -> list[float]:
    return [float(share) for share in re.findall(r"replayed[ =]([\d.]+)", output)]


def test_resumes_bit_for_bit_and_logs_the_share(corpus: Path, tmp_path: Path) -> None:
    """Is a run that was stopped in the middle of the second epoch the same as one that was not?

    The one replays steps that the other computes. The share of replayed steps is in the log, every 10 updates and at an
    epoch's end. The monitor computes one step in ten. (By default, fairseq has other batches after an interruption.)
    """
    options = ("--max-epoch", 3, "--save-interval-updates", 75, "--update-epoch-batch-itr", "True")
    output = train(corpus, tmp_path / "whole", *options)
    (saved,) = (tmp_path / "whole").glob("checkpoint_2_75.pt")
    ends = [float(share) for share in re.findall(r"\| epoch \d+ \|.*\| replayed ([\d.]+)", output)]
    assert len(ends) == 3 and ends[0] > 0.6 and min(ends[1:]) > 0.85, output
    steps = int(last(tmp_path / "whole")["optimizer_history"][-1]["num_updates"])
    assert len(shares(output)) == 3 + steps // 10
    (tmp_path / "resumed").mkdir()
    saved.rename(tmp_path / "resumed/checkpoint_last.pt")
    resumed = train(corpus, tmp_path / "resumed", *options)
    assert "(epoch 2 @ 75 updates)" in resumed and shares(resumed)[0] < 0.9
    assert_same_state(last(tmp_path / "resumed"), last(tmp_path / "whole"))
