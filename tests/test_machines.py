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
from recipes.grid import front as grids
from recipes.processes import SCRIPT
from recipes.recipe import read
from recipes.settings import Demo
from recipes.steps.guard import exclusive_folder
from recipes.steps.progress import progress
from recipes.translation import Translation

SMALL = ["PAIRS=1500", "LAYERS=1", "UPDATES=6", "SAVE_EVERY=3", "LOG_EVERY=1", "AVERAGE=2"]
BY = {16: 8192, 32: 16384, 80: 32768}


def planned(*words: str) -> machines.Machines:
    """The plan of an update of 32,768 tokens. The papers' batch per device has 8,192."""
    given = dict(word.split("=", 1) for word in words)
    return machines.plan(Demo(DEVICE="gpu", TOKENS=32768, DEVICE_TOKENS=8192, BY_MEMORY=BY, **given))


@pytest.mark.parametrize(("memory", "tokens"), [(17, 4096), (34, 8192), (79, 16384), (85, 16384), (161, 32768)])
def test_a_batch_counts_the_memory_of_graphs(memory, tokens):
    """Graphs keep a step's activations twice: a card has half of the tokens, or those of a card of half its memory."""
    for option in ("--admin-fast graph", "--admin-fast=graph --dropout 0.1"):
        assert planned("GPUS=1", f"MEMORY={memory}", f"TRAIN_ARGS={option}").max_tokens == tokens
    assert planned("GPUS=1", "MEMORY=17", "TRAIN_ARGS=--admin-fast on").max_tokens == 8192


def command(target: str, *words: str) -> list[str]:
    """A recipe's fairseq-train command."""
    return Translation(read(target, dict(word.split("=", 1) for word in words))).command()


def test_a_cpu_has_the_tokens_of_an_update_whatever_gpus_are_given():
    assert machines.plan(read("iwslt14", {"PRESET": "small", "GPUS": "2"}).settings).tokens == 2048


# -- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "plan"),
    [
        ("MEMORY=17.2", (8192, 2, 4096)),
        ("MEMORY=42.9", (16384, 1, 8192)),
        ("MEMORY=141", (16384, 1, 8192)),
        ("MAX_TOKENS=3000", (2048, 8, 1024)),
    ],
)
def test_a_batch_is_the_tables_for_the_cards_memory_or_what_fits_the_users(word, plan):
    found = planned("GPUS=2", word)
    assert (found.max_tokens, found.update_freq, found.smaller_batch) == plan and found.tokens == 32768


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "GPUS=6",
            "does not split over 6 devices into equal batches of 1024 tokens or more that fit. Give GPUS=4, or",
        ),
        ("GPUS=1 MEMORY=11.5", "a GPU has 11.5 GB, and this model was planned for 16 GB or more"),
    ],
)
def test_what_cannot_be_is_refused(words, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        planned(*words.split())


def test_gpus_are_asked_of_nvidia_smi(nvidia_smi, monkeypatch):
    """nvidia-smi lists the GPUs. The smallest memory counts. On a cluster's login node, no GPU counts."""
    nvidia_smi(16384, 49152)
    found = planned()
    assert (found.gpus, found.max_tokens, found.update_freq) == (2, 8192, 2)
    assert planned("WHERE=slurm").gpus == 1
    monkeypatch.setenv(SCRIPT, "train.sh")
    assert planned("WHERE=slurm").gpus == 2, "inside a job"


@pytest.mark.parametrize("count", [1, 3, 4, 8])
def test_iwslt14_trains_on_the_papers_one_gpu(nvidia_smi, count):
    """IWSLT'14 trains on one GPU, as in the paper, unless GPUS= is given. A WMT recipe uses all GPUs."""
    nvidia_smi(*[81920] * count)
    plan = machines.plan(read("iwslt14", {}).settings)
    assert (plan.gpus, plan.max_tokens, plan.update_freq) == (1, 4096, 1)
    if count in (4, 8):
        assert machines.plan(read("iwslt14", {"GPUS": "2"}).settings).gpus == 2
        wmt14 = machines.plan(read("wmt14-ende-18l", {}).settings)
        assert (str(wmt14), wmt14.tokens) == (f"1 x {count} x 1 batches of up to {32768 // count} tokens", 32768)


def test_where_gpus_are_missing_the_presets_for_a_cpu_are_named():
    for target, given, preset in (("iwslt14", {}, "small"), ("multi30k", {"PRESET": "gpu"}, "cpu")):
        recipe = read(target, {"GPUS": "2", **given})
        plan = machines.plan(recipe.settings)
        assert re.fullmatch(
            r"torch \S+ runs on 0 GPUs here \(.+; CUDA_VISIBLE_DEVICES=\), and the run needs 2. Give GPUS=, or take "
            rf"another build: .* TORCH=cu126 .* Or train on a CPU with PRESET={preset}\.",
            machines.faults(plan, "fp16", recipe.file.presets),
        )


def test_how_an_update_splits_is_said_and_missing_gpus_are_refused_before_the_text(tmp_path, monkeypatch, capsys):
    run = Translation(read("wmt14-ende-18l", {"GPUS": "4", "RUNS": str(tmp_path)}))
    monkeypatch.setattr(machines, "faults", lambda *_: "no GPU")
    with pytest.raises(ValueError, match="no GPU"):
        run.make("all")
    assert "An update of 32768 tokens: 1 x 4 x 1 batches of up to 8192 tokens" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_cuda_visible_devices_chooses_in_its_order(nvidia_smi, monkeypatch):
    nvidia_smi(16384, 49152, 81920)
    assert [round(gpu.memory) for gpu in machines.visible_gpus()] == [17, 52, 86]
    for wanted, indices in {
        "2,0": "20", "": "", "-1": "", "1": "1", " 1 , 2": "12", "GPU-b": "1", "0,7,1": "0", "GPU-x,0": "",
    }.items():  # fmt: skip
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)
        assert "".join(gpu.index for gpu in machines.visible_gpus()) == indices, wanted
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1234")
    assert [(gpu.index, gpu.memory) for gpu in machines.visible_gpus()] == [("MIG-1234", None)]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    nvidia_smi(16384, status=9)
    assert machines.visible_gpus() == []


@pytest.mark.cuda
def test_a_torch_that_runs_says_nothing():
    precision = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    assert machines.faults(planned("GPUS=1", "MAX_TOKENS=1024"), precision, {}) == ""


@pytest.mark.parametrize(
    ("words", "mib", "plan", "cards"),
    [
        ("iwslt14", (2048, 49152), (1, 4096), "b"),  # a display card, and one to train on
        ("iwslt14", (11178,), (1, 4096), ""),  # a GTX 1080 Ti, the paper's card
        ("iwslt14", (49152, 11178), (1, 4096), "a"),
        ("wmt14-ende-18l", (15079,), (1, 8192), ""),  # a T4 has 16 GB
        ("wmt14-ende-18l", (2048, 32510, 32510, 49152, 32510), (4, 8192), "dbce"),
        ("wmt14-ende-18l GPUS=2", (15079, 81559, 32510), (2, 16384), "bc"),
        ("wmt14-ende-18l GPUS=2 NODES=2 MASTER=h:1", [32768] * 4, (2, 8192), "ab"),
        ("wmt14-ende-18l GPUS=1 MEMORY=40", (2048, 2048), (1, 16384), "a"),
    ],
)
def test_the_largest_gpus_train_and_no_other_counts(nvidia_smi, monkeypatch, words, mib, plan, cards):
    """No process of the recipe sees another card. A card may report up to 5 % less memory than its name says."""
    nvidia_smi(*mib)
    target, *given = words.split()
    planned = machines.plan(read(target, dict(word.split("=") for word in given)).settings)
    assert (planned.gpus, planned.max_tokens) == plan
    monkeypatch.setattr(sys, "argv", ["recipes", target, *given, "RUNS=nowhere", "-n"])
    main()
    assert os.environ.get("CUDA_VISIBLE_DEVICES", "") == ",".join(f"GPU-{card * 8}-0000" for card in cards)


def test_a_card_that_is_too_small_is_refused_if_it_is_asked_for(nvidia_smi):
    nvidia_smi(2048, 49152)
    with pytest.raises(ValueError, match="a GPU has 2.1 GB, and this model was planned for 16 GB or more"):
        planned("GPUS=2")
    nvidia_smi(2048)
    with pytest.raises(ValueError, match="a GPU has 2.1 GB"):
        planned()


def test_out_of_memory_names_the_batch_to_give():
    """After out-of-memory messages, a smaller batch is suggested once, however often fairseq repeats the messages."""
    line = "2026-01-01 00:00:00 | WARNING | fairseq.trainer | OOM: Ran out of memory with exception: CUDA."
    said = "Out of memory: stop this, and give MAX_TOKENS=4096; an update holds as many tokens as before."
    assert [text for text in progress([line, line], smaller_batch=4096) if "MAX_TOKENS" in text] == [said]


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
def test_what_a_recipe_tells_its_processes_of_threads_and_memory(own, told):
    exported = read("multi30k", own).settings.exported()
    assert {name: value for name, value in exported.items() if re.match("G?OMP_|GLIBC_", name)} == told
    assert exported["PYTHONUTF8"] == "1" and read("demo", {}).settings.exported()["OMP_NUM_THREADS"] == "1"


def test_a_word_comes_before_the_shells_variable(monkeypatch):
    for words, threads in (("OMP_NUM_THREADS=2", "2"), ("", "3")):
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        monkeypatch.setattr(sys, "argv", ["recipes", "demo", *words.split(), "RUNS=nowhere", "-n"])
        main()
        assert os.environ["OMP_NUM_THREADS"] == threads


FLAGS = {"fp16": "--fp16", "me-fp16": "--memory-efficient-fp16", "amp": "--amp", "bf16": "--bf16", "fp32": None}


@pytest.mark.parametrize("precision", FLAGS)
def test_the_wanted_precision_and_no_other(precision):
    grid = grids.of(read("compare", {"PRESET": "gpu", "PRECISION": precision}))
    grid = grid.run(next(grid.points())).command()
    for words in (command("iwslt14", "GPUS=1", f"PRECISION={precision}"), grid):
        assert [word for word in words if word in FLAGS.values()] == list(filter(None, [FLAGS[precision]]))


def test_what_needs_no_gpu_sees_none(nvidia_smi, monkeypatch):
    """A grid on the CPU hides GPUs from its runs; on GPUs, each run has one. A text is prepared next to any GPUs."""
    nvidia_smi(8192, 8192)
    for words, seen in (("compare PRESET=gpu", "0,1"), ("sensitivity", ""), ("wmt14-ende-100l-prepare", "")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        monkeypatch.setattr(sys, "argv", ["recipes", *words.split(), "RUNS=nowhere", "-n"])
        main()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


# -- several machines ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_nodes_meet_and_train_one_model(tmp_path):
    assert front("demo-prepare", *SMALL, f"RUNS={tmp_path}", "INIT=reference").returncode == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "recipes", "demo-train", *SMALL, f"RUNS={tmp_path}", "INIT=reference", "NODES=2"]
    logs = [tmp_path / f"node{node}.log" for node in (0, 1)]
    nodes = [
        subprocess.Popen(
            [*words, f"MASTER=127.0.0.1:{port}"], cwd=ROOT, env=make_environment(SLURM_NODEID=str(node)),
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
    folder = tmp_path / "demo/admin-cpu-s1"
    log = (folder / "train.log").read_text()
    assert "'distributed_world_size': 2" in log and log.count("Admin: profiled") == 1
    assert len(re.findall(r"\| train_inner \|", log)) == 6
    assert (folder / "train-node1.log").exists() and (folder / "trained-6").exists()
    # The tokens of both nodes count: about 1,000 each.
    assert float(re.findall(r'"wpb": "([\d.]+)"', log)[0]) > 1200


def test_a_machine_that_waits_says_for_whom(tmp_path, monkeypatch, capsys):
    """The line names the machines that do not hold the lock of their run."""
    words = ["NODES=3", f"RUNS={tmp_path}", "MASTER=h:1", "NODE_RANK=0"]
    waiting = Translation(read("demo", dict(word.split("=") for word in words)))
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
        assert "Waiting for NODE_RANK=2, which has not begun." in printed(0.5) and not printed(0)
        with exclusive_folder(waiting.folder, 2):
            assert "Waiting for the others, which have begun." in printed(0.5)
    assert "Waiting for NODE_RANK=1 2, which" in printed(0.5)


def test_a_nodes_first_rank_is_its_number_times_its_gpus(monkeypatch):
    """A node's first rank is its number, from NODE_RANK= or Slurm, times its GPUs.

    The options are given on one node, too. Without them, fairseq would take all GPUs of all nodes of a Slurm job.
    """
    alone = r"--distributed-world-size 2 --distributed-init-method tcp://localhost:\d{4,5} --distributed-rank 0 "
    assert re.search(alone, " ".join(command("wmt14-ende-18l", "GPUS=2")))
    given = ["NODES=3", "GPUS=4", "MASTER=[fd00::1]:1", "TOKENS=", "MAX_TOKENS=512"]
    assert "--distributed-world-size 12 --distributed-init-method tcp://[fd00::1]:1 --distributed-rank 8" in " ".join(
        command("wmt14-ende-18l", *given, "NODE_RANK=2")
    )
    monkeypatch.setenv("SLURM_NODEID", "1")
    assert "--distributed-rank 4 " in " ".join(command("wmt14-ende-18l", *given))


def test_other_nodes_only_train():
    done = front("demo", "-n", "NODES=2", "MASTER=h:1", "NODE_RANK=1")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "NODE_RANK=1 of several only trains; run the target that ends in -train there." in done.stderr
