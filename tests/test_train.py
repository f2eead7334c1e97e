"""The recipes' training command adds what fairseq-train lacks, and otherwise does the same."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import conftest
import pytest
import torch
from conftest import ROOT, TRAIN, names

from fairseq_admin.errors import AdminError
from recipes import recipe
from recipes.steps import guard, train
from recipes.steps.checkpoints import newest, reached
from recipes.training import Run

BF16 = ["--bf16", "--fp16-no-flatten-grads", "--max-update", "3"]


def test_bf16_trains(run, corpus, tmp_path):
    given = [corpus, *TRAIN, *BF16, "--save-dir", tmp_path / "run"]
    # fairseq-train cannot do this. If this check fails one day, the recipe's own step is no longer needed.
    assert run("fairseq_cli.train", *given).status != 0
    assert not (tmp_path / "run/checkpoint_last.pt").exists()
    done = run("recipes.steps.train", *given)
    assert done.status == 0, done.output
    state = torch.load(tmp_path / "run/checkpoint_last.pt", weights_only=False)
    assert state["cfg"]["common"]["bf16"] and not state["cfg"]["common"]["tpu"]
    # fairseq stores float32 with bf16's values.
    weights = [tensor for name, tensor in state["model"].items() if "weight" in name]
    assert all(torch.equal(weight, weight.bfloat16().float()) for weight in weights)
    assert "Admin: profiled" in done.output and "num_updates: 3" in done.output


def test_without_bf16_it_is_fairseq_train(run, corpus, tmp_path):
    weights = []
    for name, module in (("stock", "fairseq_cli.train"), ("step", "recipes.steps.train")):
        done = run(module, corpus, *TRAIN, "--max-update", 3, "--save-dir", tmp_path / name)
        assert done.status == 0, done.output

        weights.append(torch.load(tmp_path / name / "checkpoint_last.pt", weights_only=False)["model"])
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


ONE_UPDATE_AN_EPOCH = (
    "--max-tokens 9999 --save-interval-updates 2 --validate-interval-updates 2 --save-interval 1000000 "
    "--validate-interval 1000000 --no-last-checkpoints --update-epoch-batch-itr True"
).split()


def test_an_update_that_ends_an_epoch_has_its_checkpoint(run, corpus, tmp_path):
    given = [corpus, *TRAIN, *ONE_UPDATE_AN_EPOCH, "--keep-interval-updates", 2]
    # fairseq-train cannot do this. If this check fails one day, the recipe's own step is no longer needed.
    assert run("fairseq_cli.train", *given, "--max-update", 4, "--save-dir", tmp_path / "stock").status == 0
    assert names(tmp_path / "stock") == {"checkpoint_best.pt"}
    logs = {}
    for name, lengths in (("whole", [6]), ("parts", [4, 4, 6])):
        done = [run("recipes.steps.train", *given, "--max-update", n, "--save-dir", tmp_path / name) for n in lengths]
        assert all(it.status == 0 for it in done), [it.output for it in done]
        logs[name] = "".join(it.output for it in done)
        assert names(tmp_path / name) == {"checkpoint_best.pt", "checkpoint_4_4.pt", "checkpoint_6_6.pt"}
    for log in logs.values():
        assert re.findall(r"valid on .* num_updates (\d+)", log) == ["2", "4", "6"]
        assert re.findall(r" num_updates=(\d+)", log) == list("123456"), "the second time, nothing was left to do"
    whole, parts = (torch.load(tmp_path / name / "checkpoint_6_6.pt", weights_only=False) for name in logs)
    assert all(torch.equal(whole["model"][key], parts["model"][key]) for key in whole["model"])
    assert whole["extra_state"]["train_iterator"] == parts["extra_state"]["train_iterator"]


@pytest.mark.slow
def test_processes_that_load_batches_outlive_a_signal_to_stop(corpus, tmp_path):
    """Slurm sends SIGTERM to every process of a training. What remains of the update needs its batches."""
    options = ["--num-workers", 2, "--max-tokens", 30, "--max-update", 60, "--disable-validation", "--no-save"]
    process = started(corpus, tmp_path, *options)
    assert any("num_updates=3," in line for line in process.stdout)
    loaders = [int(pid) for pid in subprocess.check_output(["pgrep", "-P", str(process.pid)], text=True).split()]
    for pid in loaders:
        os.kill(pid, signal.SIGTERM)
    rest = process.stdout.read()
    assert loaders and process.wait(300) == 0, rest


def _spawning(arguments: list[str], log: Path) -> None:
    """Run two processes that fairseq spawns, as with two GPUs."""
    torch.cuda.device_count = lambda: 2
    conftest._child("recipes.steps.train", arguments, log)


def started(corpus: Path, folder: Path, *options: object) -> subprocess.Popen:
    command = [sys.executable, "-m", "recipes.steps.train", corpus, *TRAIN, "--save-dir", folder, *options]
    return subprocess.Popen(
        [str(word) for word in command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


BY_UPDATES = (
    "--save-interval-updates 20 --validate-interval-updates 20 --keep-interval-updates 1 --max-update 60".split()
)
BY_UPDATES += ["--save-interval", "1000000", "--validate-interval", "1000000", "--no-last-checkpoints"]


def own_batches() -> list[str]:
    """The option with which a recipe's training draws new batches in every epoch, also after a resume."""
    words = Run(recipe.read("demo", {})).train_words()
    place = words.index("--update-epoch-batch-itr")
    return words[place : place + 2]


def state(path: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer state, by name."""
    saved = torch.load(path, weights_only=False)
    memory = saved["last_optimizer_state"]["state"]
    return saved["model"] | {f"{n}.{name}": torch.as_tensor(value) for n in memory for name, value in memory[n].items()}


@pytest.mark.slow
def test_a_training_that_is_told_to_stop_goes_on_bit_for_bit(corpus, tmp_path):
    """A training that is stopped in mid-epoch resumes bit for bit.

    For two more epochs, it has the same batches as an uninterrupted training.
    """
    options = [*BY_UPDATES, *own_batches()]
    whole = started(corpus, tmp_path / "whole", *options)
    assert whole.wait(300) == 0, whole.stdout.read()
    for number, update in ((signal.SIGTERM, 24), (signal.SIGUSR2, 44)):
        process = started(corpus, tmp_path / "parts", *options)
        assert any(f"num_updates={update}" in line for line in process.stdout), "it ended before"
        process.send_signal(number)
        rest = process.stdout.read()
        assert process.wait(300) == 130, rest
        (path,) = (tmp_path / "parts").glob("checkpoint_stopped_*")
        assert newest(tmp_path / "parts") == path and update <= reached(path) < update + 16
        assert "Traceback" not in rest and "valid on" not in rest, "it stops at once"
    again = started(corpus, tmp_path / "parts", *options)
    assert again.wait(300) == 0, again.stdout.read()
    assert names(tmp_path / "parts") == names(tmp_path / "whole")
    first, second = (state(newest(tmp_path / name)) for name in ("whole", "parts"))
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    saved = torch.load(newest(tmp_path / "parts"), weights_only=False)
    assert saved["extra_state"]["previous_training_time"] < 1e6


@pytest.mark.slow
def test_where_fairseq_starts_the_processes(corpus, tmp_path):
    spawn = "--distributed-world-size 2 --distributed-backend gloo --ddp-backend legacy_ddp --disable-validation"
    given = [corpus, *TRAIN, *ONE_UPDATE_AN_EPOCH, *spawn.split(), "--max-update", 2, "--save-dir", tmp_path / "run"]
    status, log = conftest.run_process(_spawning, [str(it) for it in given], log=tmp_path / "log")
    assert status == 0 and names(tmp_path / "run") == {"checkpoint_2_2.pt"}, log
    assert len(re.findall(r" \| INFO \| train_inner \| ", log)) == 2, "in fairseq's form, which the recipes read"


def test_all_nodes_go_on_from_the_checkpoint_that_the_first_one_finds(tmp_path, monkeypatch):
    """All nodes resume from the first node's checkpoint, even if this node's listing is stale or lacks the file."""
    for update in (50, 100):
        (tmp_path / f"checkpoint_1_{update}.pt").touch()

    def broadcast(objects: list, src: int) -> None:
        objects[src] = first

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", broadcast)
    monkeypatch.setattr(guard, "NFS_WAIT", 0)
    for first in (tmp_path / "checkpoint_1_50.pt", None):
        assert train.agreed_checkpoint(tmp_path) == first
    first = tmp_path / "checkpoint_1_150.pt"
    with pytest.raises(ValueError, match="checkpoint_1_150.pt: another node has it, and this one did not see it"):
        train.agreed_checkpoint(tmp_path)
    first = AdminError("all are damaged")
    with pytest.raises(AdminError, match="all are damaged"):
        train.agreed_checkpoint(tmp_path)


def test_a_checkpoint_last_that_was_cut_short_is_named(run, corpus, tmp_path):
    given = ["recipes.steps.train", corpus, *TRAIN, "--save-dir", tmp_path / "run", "--max-update", 2]
    assert run(*given).status == 0
    last = tmp_path / "run/checkpoint_last.pt"
    os.truncate(last, 9999)
    done = run(*given)
    assert done.status == 2 and "Traceback" not in done.output and last.stat().st_size == 9999
    assert done.output.endswith("and no older checkpoint is whole. Copy it again, or remove it to begin again.\n")
    assert f"{last} is damaged (File is not a zip file)" in done.output


def test_the_newest_is_the_longest_trained(tmp_path):
    assert newest(tmp_path) is None and reached(None) == 0
    order = ["checkpoint1.pt", "checkpoint_2_90.pt", "checkpoint_2_100.pt", "checkpoint_stopped_2_100.pt"]
    order += ["checkpoint_stopped_2_107.pt", "checkpoint2.pt", "checkpoint_10_500.pt"]
    for age, name in enumerate(order):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, -age))  # as after a copy without timestamps
        assert newest(tmp_path) == tmp_path / name
    for name in ("checkpoint_best.pt", "checkpoint_last.pt", "checkpoint_11_900.pt.tmp", "average.pt"):
        (tmp_path / name).touch()
    assert newest(tmp_path) == tmp_path / order[-1]
    assert [reached(tmp_path / name) for name in order] == [0, 90, 100, 100, 107, 0, 500]
