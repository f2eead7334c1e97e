"""Which devices, precision and processes do the recipes give fairseq-train? (No GPU is needed to plan for one.)"""

from __future__ import annotations

import os
import re
import sys
from functools import partial

import pytest
import torch

from recipes import recipe
from recipes.__main__ import main
from recipes.grid import front as grids
from recipes.translation import Pipeline

FIRST_SPINNING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}
HUGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def planned(target: str, *words: str) -> list[str]:
    """The words of a recipe's training command."""
    return Pipeline(recipe.read(target, dict(word.split("=") for word in words))).run.command()


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({}, {**FIRST_SPINNING, **HUGE}),
        (
            {"GOMP_SPINCOUNT": "1", "GLIBC_TUNABLES": ""},
            {**FIRST_SPINNING, "GOMP_SPINCOUNT": "1", "GLIBC_TUNABLES": ""},
        ),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE", **HUGE}),
    ],
)
def test_what_a_recipe_tells_its_processes_of_threads_and_memory(own, told):
    exported = recipe.read("multi30k", own).settings.exported()
    assert {name: value for name, value in exported.items() if re.match("G?OMP_|GLIBC_", name)} == told
    assert exported["PYTHONUTF8"] == "1" and recipe.read("demo", {}).settings.exported()["OMP_NUM_THREADS"] == "1"


def of_a_grid(*words: str) -> list[str]:
    """fairseq-train's options in a grid's run."""
    return grids.of(recipe.read("compare", dict(word.split("=") for word in words))).common()


FLAGS = {"fp16": "--fp16", "me-fp16": "--memory-efficient-fp16", "amp": "--amp", "bf16": "--bf16", "fp32": None}


@pytest.mark.parametrize("kind", ["front", "grid"])
def test_the_wanted_precision_and_no_other(kind):
    plan = (
        (lambda *words: planned("iwslt14", "GPUS=1", *words)) if kind == "front" else partial(of_a_grid, "PRESET=gpu")
    )
    for precision, flag in FLAGS.items():
        words = plan(f"PRECISION={precision}")
        assert [word for word in words if word in FLAGS.values()] == [flag] * (flag is not None), precision
    assert "--fp16" in plan()


@pytest.mark.parametrize("target", ["demo", "iwslt14 PRESET=small", "multi30k PRESET=cpu"])
def test_a_run_on_the_cpu_sees_no_gpu(target):
    words = planned(*target.split())
    assert "--cpu" in words and words[words.index("--distributed-world-size") + 1] == "1"


def test_a_grid_on_the_cpu_sees_no_gpu(monkeypatch):
    """It hides them from its runs, and on GPUs each run has one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert "--cpu" in of_a_grid("PRESET=cpu") and "--cpu" not in of_a_grid("PRESET=gpu")
    for words, seen in (("compare PRESET=gpu", "0,1"), ("sensitivity", "")):
        monkeypatch.setattr(sys, "argv", ["recipes", *words.split(), "RUNS=nowhere", "-n"])
        main()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


def test_a_job_on_several_nodes_that_forgot_nodes_is_one_run(monkeypatch):
    """The second node would have a lock of its own, and both would train into one folder."""
    monkeypatch.setenv("SLURM_NODEID", "1")
    pipeline = Pipeline(recipe.read("iwslt14", {"GPUS": "1"}))
    assert pipeline.machine.node == 0 and "--max-epoch" in pipeline.run.command()


def test_a_slurm_job_trains_on_as_many_gpus_as_the_plan_says(monkeypatch, tmp_path):
    """fairseq would take a world size from SLURM's variables: all GPUs of all nodes, whatever it is told."""
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.distributed.utils import infer_init_method

    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho node1\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    slurm = {
        "JOB_ID": "7",
        "JOB_NODELIST": "node[1-2]",
        "NNODES": "2",
        "NTASKS": "2",
        "NTASKS_PER_NODE": "1",
        "NODEID": "0",
    }
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    words = planned("wmt14-ende-18l", "GPUS=2")
    begin, end = words.index("--distributed-world-size"), words.index("--max-epoch")
    given = words[begin:end]
    args = options.parse_args_and_arch(options.get_training_parser(), ["data", "--arch", "transformer", *given])
    cfg = convert_namespace_to_omegaconf(args)
    infer_init_method(cfg.distributed_training)
    assert cfg.distributed_training.distributed_world_size == 2
    method = cfg.distributed_training.distributed_init_method
    assert re.fullmatch(r"tcp://localhost:\d+", method) and 1024 < int(method.rpartition(":")[2]) < 65536
    # One GPU needs no other process.
    assert "--distributed-init-method" not in planned("wmt14-ende-18l", "GPUS=1")
