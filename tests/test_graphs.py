"""Recorded steps: which shapes of batch are recorded, what a failure leaves, the log, and resuming.

test_cuda.py compares them with computed steps on a GPU. Here a stand-in computes a replay."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
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


@pytest.mark.parametrize("memory", [True, False])
def test_a_shape_that_cannot_be_recorded_is_computed(
    memory: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Is it said once and not tried again, and are other shapes recorded, in the same pool if memory ran out?

    After an invalid call torch's generator goes on waiting for its recording to end, so another one is made.
    """
    error = torch.cuda.OutOfMemoryError("CUDA out of memory") if memory else RuntimeError("not permitted\nCompile")
    tried: list[int] = []

    def pair(losses_of: Any, batch: dict[str, Any], steps: RecordedSteps) -> object:
        tried.append(len(batch["target"]))
        if tried[-1] == 1:
            raise error
        return object()

    monkeypatch.setattr(graphs, "_Pair", pair)
    recordings: list[Any] = []
    monkeypatch.setattr(graphs, "record", lambda function, steps: recordings.append((function(), steps.pool)))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "another pool")
    steps = RecordedSteps(torch.nn.Linear(1, 1), [])
    with caplog.at_level(logging.WARNING):
        assert replayed(steps, 1, 1, 1, 2, 2, 1) == [False, False, False, False, True, False]
    assert tried == [1, 2]
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    reason = str(error).partition("\n")[0]
    assert line == f"Admin: --admin-fast graph: batches of {{'target': (1,)}} are computed, not replayed: {reason}"
    assert [pool for _, pool in recordings] == ([] if memory else ["another pool"])
    assert steps.pool == (None if memory else "another pool") and len(steps.broken) == (not memory)


def test_other_errors_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def pair(*_: Any) -> None:
        raise ValueError("a mistake of ours")

    monkeypatch.setattr(graphs, "_Pair", pair)
    with pytest.raises(ValueError, match="a mistake of ours"):
        replayed(RecordedSteps(torch.nn.Linear(1, 1), []), 1, 1)


class Stream:
    device = 0


def test_a_failed_recording_leaves_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own context does not switch back to the old stream if its capture_end fails."""
    streams = [Stream(), Stream()]
    current = streams[0]

    def set_stream(stream: Stream) -> None:
        nonlocal current
        current = stream

    @contextlib.contextmanager
    def capture(graph: object, **_: Any) -> Iterator[None]:
        set_stream(streams[1])
        try:
            yield
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "_get_device_index", lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current)
    monkeypatch.setattr(torch.cuda, "set_stream", set_stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    steps = RecordedSteps(torch.nn.Linear(1, 1), [])
    with pytest.raises(RuntimeError, match="previous error"):
        graphs.record(lambda: None, steps)
    assert current is streams[0]


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
