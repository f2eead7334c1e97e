"""Devices, batches, precision and processes that the recipes give fairseq-train. A plan needs no GPU."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, front, make_environment

from recipes import machines
from recipes.__main__ import main
from recipes.processes import SCRIPT
from recipes.recipe import read
from recipes.research import grid as grids
from recipes.settings import Settings, exported
from recipes.steps.guard import exclusive_folder
from recipes.steps.progress import progress
from recipes.training import Run

SMALL = ["PREPARE_ARGS=--pairs 1500", "LAYERS=1", "UPDATES=6", "ARGS=--log-interval 1", "INIT=reference"]


def planned(*words: str, limit: int = 8192) -> machines.Machines:
    """The plan of an update of 32,768 tokens, in batches of `limit` tokens or fewer."""
    given = dict(word.split("=") for word in words)
    return machines.plan({"--max-tokens": str(limit)}, 32768, 4, Settings(**given))


def command(target: str, *words: str) -> list[str]:
    """A recipe's options of fairseq-train."""
    return Run(read(target, dict(word.split("=", 1) for word in words))).train_words()


def test_a_cpu_has_the_tokens_of_an_update_whatever_gpus_are_given():
    assert Run(read("iwslt14", {"PRESET": "small", "GPUS": "2"})).machine.tokens == 2048


# -- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "plan"),
    [(8192, (8192, 2, 4096)), (16384, (16384, 1, 8192)), (30000, (16384, 1, 8192)), (3000, (2048, 8, 1024))],
)
def test_a_batch_is_the_largest_that_divides_the_update(limit, plan):
    found = planned("GPUS=2", limit=limit)
    assert (found.max_tokens, found.update_freq, found.smaller_batch) == plan and found.tokens == 32768


def test_what_cannot_be_is_refused():
    message = "does not split over 6 devices into equal batches of 1024 tokens or more that fit. Give GPUS=4, or"
    with pytest.raises(ValueError, match=re.escape(message)):
        planned("GPUS=6")


def test_a_users_batch_keeps_the_update_unless_its_number_is_given():
    """--max-tokens alone, as after out of memory, splits the same update. With --update-freq it is another update."""
    for args, tokens in (
        ("--max-tokens 512", 1024),
        ("--max-tokens 512 --update-freq 1", 512),
        ("--update-freq 3", 3072),
    ):
        run = Run(read("demo", {"ARGS": args}))
        assert run.recipe.tokens == run.machine.tokens == tokens, args


def test_gpus_are_asked_of_nvidia_smi(nvidia_smi, monkeypatch):
    """nvidia-smi lists the GPUs. On a cluster's login node, no GPU counts."""
    nvidia_smi(16384, 24576)
    found = planned()
    assert (found.gpus, found.max_tokens, found.update_freq) == (2, 8192, 2)
    assert planned("WHERE=slurm").gpus == 1
    monkeypatch.setenv(SCRIPT, "train.sh")
    assert planned("WHERE=slurm").gpus == 2, "inside a job"


@pytest.mark.parametrize("count", [1, 3, 4, 8])
def test_iwslt14_trains_on_the_papers_one_gpu(nvidia_smi, count):
    """IWSLT'14 trains on one GPU, as in the paper, unless GPUS= is given. A WMT recipe uses all GPUs."""
    nvidia_smi(*[81920] * count)
    plan = Run(read("iwslt14", {})).machine
    assert (plan.gpus, plan.max_tokens, plan.update_freq) == (1, 4096, 1)
    if count in (4, 8):
        assert Run(read("iwslt14", {"GPUS": "2"})).machine.gpus == 2
        wmt14 = Run(read("wmt14-ende-18l", {})).machine
        assert (str(wmt14), wmt14.tokens) == (f"1 x {count} x 1 batches of up to {32768 // count} tokens", 32768)


def test_where_gpus_are_missing_the_presets_for_a_cpu_are_named():
    for target, given, preset in (("iwslt14", {}, "small"), ("multi30k", {"PRESET": "gpu"}, "cpu")):
        run = Run(read(target, {"GPUS": "2", **given}))
        assert re.fullmatch(
            r"torch \S+ runs on 0 GPUs here \(.+; CUDA_VISIBLE_DEVICES=\), and the run needs 2. Give GPUS=, or take "
            rf"another build: .* TORCH=cu126 .* Or train on a CPU with PRESET={preset}\.",
            run.device_fault(),
        )


def test_how_an_update_splits_is_said_and_missing_gpus_are_refused_before_the_text(tmp_path, monkeypatch, capsys):
    run = Run(read("wmt14-ende-18l", {"GPUS": "4", "RUNS": str(tmp_path)}))
    monkeypatch.setattr(machines, "faults", lambda *_: "no GPU")
    with pytest.raises(ValueError, match="no GPU"):
        run.make("all")
    assert "An update of 32768 tokens: 1 x 4 x 1 batches of up to 8192 tokens" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_cuda_visible_devices_chooses_in_its_order(nvidia_smi, monkeypatch):
    nvidia_smi(16384, 49152, 81920)
    for wanted, indices in {
        "2,0": "20", "": "", "-1": "", "1": "1", " 1 , 2": "12", "GPU-b": "1", "0,7,1": "0", "GPU-x,0": "",
    }.items():  # fmt: skip
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)
        assert "".join(gpu.index for gpu in machines.visible_gpus()) == indices, wanted
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1234")
    assert [gpu.index for gpu in machines.visible_gpus()] == ["MIG-1234"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    nvidia_smi(16384, status=9)
    assert machines.visible_gpus() == []


@pytest.mark.cuda
def test_a_torch_that_runs_says_nothing():
    precision = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    assert machines.faults(planned("GPUS=1"), precision, []) == ""


@pytest.mark.parametrize(
    ("words", "mib", "plan", "cards"),
    [
        ("iwslt14", (2048, 49152), (1, 4096), "b"),  # a display card, and one to train on
        ("iwslt14", (11178,), (1, 4096), ""),  # a GTX 1080 Ti, the paper's card
        ("iwslt14", (49152, 11178), (1, 4096), "a"),
        ("wmt14-ende-18l", (15079,), (1, 8192), ""),  # a T4 has 16 GB
        ("wmt14-ende-18l", (2048, 32510, 32510, 49152, 32510), (4, 8192), "dbce"),
        ("wmt14-ende-18l GPUS=2", (15079, 81559, 32510), (2, 8192), "bc"),
        ("wmt14-ende-18l GPUS=2 NODES=0/2 MASTER=h:1", [32768] * 4, (2, 8192), "ab"),
    ],
)
def test_the_largest_gpus_train_and_no_other_counts(nvidia_smi, monkeypatch, words, mib, plan, cards):
    """No process of the recipe sees another card. A card may have any memory, as the paper's had."""
    nvidia_smi(*mib)
    target, *given = words.split()
    machine = Run(read(target, dict(word.split("=") for word in given))).machine
    assert (machine.gpus, machine.max_tokens) == plan
    monkeypatch.setattr(sys, "argv", ["recipes", f"{target}-train", *given, "RUNS=nowhere", "-n"])
    main()
    assert os.environ.get("CUDA_VISIBLE_DEVICES", "") == ",".join(f"GPU-{card * 8}-0000" for card in cards)


def test_out_of_memory_names_the_batch_to_give():
    """After out-of-memory messages, a smaller batch is suggested once, however often fairseq repeats the messages."""
    line = "2026-01-01 00:00:00 | WARNING | fairseq.trainer | OOM: Ran out of memory with exception: CUDA."
    said = "Out of memory: stop this, and give ARGS='--max-tokens 4096'; an update holds as many tokens as before."
    machine = Run(read("wmt14-ende-18l", {"GPUS": "4"})).machine
    shown = progress([line, line], smaller_batch=machine.smaller_batch)
    assert [text for text in shown if "--max-tokens" in text] == [said]
    smaller = Run(read("wmt14-ende-18l", {"GPUS": "4", "ARGS": "--max-tokens 4096"})).machine
    assert (machine.max_tokens, smaller.max_tokens, smaller.tokens) == (8192, 4096, machine.tokens)


# -- devices, precision, the environment ------------------------------------------------------------------------------

HUGE, SLEEPING = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({}, {**SLEEPING, **HUGE}),
        ({"GOMP_SPINCOUNT": "1", "GLIBC_TUNABLES": ""}, {**SLEEPING, "GOMP_SPINCOUNT": "1", "GLIBC_TUNABLES": ""}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE", **HUGE}),
    ],
)
def test_what_a_recipe_tells_its_processes_of_threads_and_memory(own, told, monkeypatch):
    for name in (*SLEEPING, *HUGE, "PYTHONUTF8"):
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    variables = exported(None) | own
    assert {name: value for name, value in variables.items() if re.match("G?OMP_|GLIBC_", name)} == told
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert variables["PYTHONUTF8"] == "1" and exported(read("demo", {}).file.threads)["OMP_NUM_THREADS"] == "1"


def test_a_word_comes_before_the_shells_variable(monkeypatch):
    for words, threads in (("OMP_NUM_THREADS=2", "2"), ("", "3")):
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        monkeypatch.setattr(sys, "argv", ["recipes", "demo", *words.split(), "RUNS=nowhere", "-n"])
        main()
        assert os.environ["OMP_NUM_THREADS"] == threads


FLAGS = {"fp16": "--fp16", "me-fp16": "--memory-efficient-fp16", "amp": "--amp", "bf16": "--bf16", "fp32": None}


@pytest.mark.parametrize("precision", FLAGS)
def test_the_wanted_precision_and_no_other(precision, tmp_path):
    grid = grids.of("compare", {"PRESET": "gpu", "PRECISION": precision, "RUNS": str(tmp_path)})
    grid = grid.run(next(grid.points())).train_words()
    for words in (command("iwslt14", "GPUS=1", f"PRECISION={precision}"), grid):
        assert [word for word in words if word in FLAGS.values()] == list(filter(None, [FLAGS[precision]]))


def test_what_needs_no_gpu_sees_none(nvidia_smi, monkeypatch):
    """A grid on the CPU hides GPUs from its runs; on GPUs, each run has one. A text is prepared next to any GPUs."""
    nvidia_smi(8192, 8192)
    cases = [
        (grids.main, "compare PRESET=gpu", "0,1"),
        (grids.main, "sensitivity", ""),
        (main, "wmt14-ende-100l-prepare", ""),
    ]
    for entry, words, seen in cases:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        monkeypatch.setattr(sys, "argv", ["recipes", *words.split(), "RUNS=nowhere", "-n"])
        entry()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


# -- several machines ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_nodes_meet_and_train_one_model(tmp_path):
    assert front("demo-prepare", *SMALL, f"RUNS={tmp_path}").returncode == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "recipes", "demo-train", *SMALL, f"RUNS={tmp_path}"]
    logs = [tmp_path / f"node{node}.log" for node in (0, 1)]
    nodes = [
        subprocess.Popen(
            [*words, f"NODES={node}/2", f"MASTER=127.0.0.1:{port}"], cwd=ROOT, env=make_environment(),
            stdout=log.open("w"), stderr=subprocess.STDOUT,
        )
        for node, log in enumerate(logs)
    ]  # fmt: skip
    try:
        ends = [node.wait(300) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert ends == [0, 0], "\n".join(log.read_text()[-2000:] for log in logs)
    folder = read("demo", dict(word.split("=", 1) for word in [*SMALL, f"RUNS={tmp_path}"])).run
    log = (folder / "train.log").read_text()
    assert "'distributed_world_size': 2" in log and log.count("Admin: profiled") == 1
    assert len(re.findall(r"\| train_inner \|", log)) == 6
    assert (folder / "train-node1.log").exists() and (folder / "at-6/train.log").exists()
    # The tokens of both nodes count: about 500 each.
    assert 600 < float(re.findall(r'"wpb": "([\d.]+)"', log)[0]) <= 1024


def test_a_machine_that_waits_says_for_whom(tmp_path, monkeypatch, capsys):
    """The line names the machines that do not hold the lock of their run."""
    words = ["NODES=0/3", f"RUNS={tmp_path}", "MASTER=h:1", "ARGS=--update-freq 3"]
    waiting = Run(read("demo", dict(word.split("=") for word in words)))
    monkeypatch.setattr("recipes.steps.progress.MEET_SECONDS", 0.2)

    def lines(seconds: float):
        yield "2026-01-01 00:00:00 | INFO | fairseq.distributed.utils | distributed init (rank 0): tcp://h:1\n"
        time.sleep(seconds)
        yield "2026-01-01 00:00:00 | INFO | fairseq.distributed.utils | initialized host h as rank 0\n"
        time.sleep(0.3)

    def printed(seconds: float) -> str:
        assert not list(progress(lines(seconds), updates=1, missing=waiting.missing))
        return capsys.readouterr().out

    with exclusive_folder(waiting.folder, 1):
        assert "Waiting for NODES=2/3, which has not begun." in printed(0.5) and not printed(0)
        with exclusive_folder(waiting.folder, 2):
            assert "Waiting for the others, which have begun." in printed(0.5)
    assert "Waiting for NODES=1/3 2/3, which" in printed(0.5)


def test_a_nodes_first_rank_is_its_number_times_its_gpus(monkeypatch):
    """A node's first rank is its number, from NODES= or Slurm, times its GPUs.

    The options are given on one node, too. Without them, fairseq would take all GPUs of all nodes of a Slurm job.
    """
    alone = r"--distributed-world-size 2 --distributed-init-method tcp://localhost:\d{4,5} --distributed-rank 0 "
    assert re.search(alone, " ".join(command("wmt14-ende-18l", "GPUS=2")))
    given = ["GPUS=4", "MASTER=[fd00::1]:1", "ARGS=--max-tokens 768 --update-freq 3"]
    assert "--distributed-world-size 12 --distributed-init-method tcp://[fd00::1]:1 --distributed-rank 8" in " ".join(
        command("wmt14-ende-18l", *given, "NODES=2/3")
    )
    monkeypatch.setenv("SLURM_NODEID", "1")
    assert "--distributed-rank 4 " in " ".join(command("wmt14-ende-18l", *given, "NODES=3"))


def test_other_nodes_only_train():
    done = front("demo", "-n", "NODES=1/2", "MASTER=h:1")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "NODES=1/2 only trains; run the target that ends in -train there." in done.stderr
