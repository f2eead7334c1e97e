"""Which devices, precision and processes do the recipes give fairseq-train? (No GPU is needed to plan for one.)"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recipes.compare.one_gpu import one_gpu

ROOT = Path(__file__).parents[1]
FIRST_SPINNING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}
HUGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
ON_GPUS = {
    "iwslt14": ["recipes/iwslt14/Makefile"],
    "wmt14": ["recipes/wmt14/Makefile", "PAIR=en-de", "SIZE=18l"],
    "compare": ["recipes/compare/Makefile", "PRESET=gpu", "SCHEMES=admin", "DEPTHS=6", "RATES=1e-3", "SEEDS=1"],
}
ON_A_CPU = {
    "demo": ["recipes/demo/Makefile"],
    "lm-demo": ["recipes/lm/Makefile"],
    "iwslt14": ["recipes/iwslt14/Makefile", "PRESET=small"],
    "multi30k": ["recipes/multi30k/Makefile", "PRESET=cpu"],
    "own": ["recipes/own/Makefile", "PRESET=cpu", "DATA=.", "PAIR=de-en"],
    "compare": ["recipes/compare/Makefile", "PRESET=cpu", "SCHEMES=admin", "DEPTHS=6", "RATES=1e-3", "SEEDS=1"],
    "sensitivity": ["recipes/sensitivity/Makefile", "PRESET=cpu", "SCHEMES=admin", "LRS=1e-4", "BETA2S=0.99"],
}


def make(recipe: list[str], *variables: str, **more: str) -> subprocess.CompletedProcess:
    mine = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    given = ["make", "-n", "-f", *recipe, f"PYTHON={sys.executable}", "RUNS=nowhere", *variables]
    return subprocess.run(given, cwd=ROOT, env={**mine, **more}, capture_output=True, text=True)


def told_of_threads_and_memory(**own: str) -> dict[str, str]:
    """What a recipe tells its processes, as the user's environment has it or in its own way."""
    mine = {name: value for name, value in os.environ.items() if not re.match("MAKE|MFLAGS|G?OMP_|GLIBC_", name)}
    source = 'import os, re; print({name: os.environ[name] for name in os.environ if re.match("G?OMP_|GLIBC_", name)})'
    recipe = f"include recipes/common.mk\nall:\n\t@$(PYTHON) -c '{source}'\n"
    given = ["make", "-f", "-", f"PYTHON={sys.executable}"]
    done = subprocess.run(given, cwd=ROOT, env={**mine, **own}, input=recipe, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)


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
    assert told_of_threads_and_memory(**own) == told


def training(recipe: list[str], *variables: str, **more: str) -> list[str]:
    """The words of the plan's training command."""
    done = make(recipe, *variables, **more)
    assert done.returncode == 0, done.stderr
    (call,) = [
        line
        for line in done.stdout.replace("\\\n", " ").splitlines()
        if "--optimizer radam" in line and "steps.settings" not in line
    ]
    return shlex.split(call)


FLAGS = {"fp16": "--fp16", "me-fp16": "--memory-efficient-fp16", "amp": "--amp", "bf16": "--bf16", "fp32": None}


@pytest.mark.parametrize("recipe", ["iwslt14", "compare"])
def test_the_wanted_precision_and_no_other(recipe):
    for precision, flag in FLAGS.items():
        words = training(ON_GPUS[recipe], f"PRECISION={precision}")
        assert [word for word in words if word in FLAGS.values()] == [flag] * (flag is not None), precision
    assert "--fp16" in training(ON_GPUS[recipe])
    done = make(ON_GPUS[recipe], "PRECISION=fp8")
    assert (
        done.returncode == 2 and "PRECISION=fp8 is unknown; expected one of fp16 me-fp16 amp bf16 fp32" in done.stderr
    )


@pytest.mark.parametrize("recipe", ["demo", "lm-demo", "multi30k", "sensitivity"])
def test_a_run_on_the_cpu_sees_no_gpu(recipe):
    words = training(ON_A_CPU[recipe])
    assert "--cpu" in words
    if recipe not in ("compare", "sensitivity"):
        assert words[words.index("--distributed-world-size") + 1] == "1"
    file, *variables = ON_A_CPU[recipe]
    command = ["make", "-f", file, f"PYTHON={sys.executable}", "RUNS=nowhere", *variables]
    command += ["--eval", "show: ; @echo visible=$$CUDA_VISIBLE_DEVICES.", "show"]
    mine = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    shown = subprocess.run(
        command, cwd=ROOT, env={**mine, "CUDA_VISIBLE_DEVICES": "0,1"}, capture_output=True, text=True
    )
    assert "visible=.\n" in shown.stdout, shown.stderr


def test_a_job_on_several_nodes_that_forgot_nodes_is_one_run():
    """The second node would have a lock of its own, and both would train into one folder."""
    plans = [make(ON_GPUS["iwslt14"], "GPUS=1", SLURM_NODEID=node).stdout for node in "01"]
    assert plans[0] == plans[1] and "--max-epoch 90" in plans[0]


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
    words = training(ON_GPUS["wmt14"], "GPUS=2")
    begin, end = words.index("--distributed-world-size"), words.index("--max-epoch")
    given = [re.sub(r"\$\(.*\)", "29500", word) for word in words[begin:end]]
    args = options.parse_args_and_arch(options.get_training_parser(), ["data", "--arch", "transformer", *given])
    cfg = convert_namespace_to_omegaconf(args)
    infer_init_method(cfg.distributed_training)
    assert cfg.distributed_training.distributed_world_size == 2
    assert cfg.distributed_training.distributed_init_method == "tcp://localhost:29500"
    # One GPU needs no other process.
    assert "--distributed-init-method" not in training(ON_GPUS["wmt14"], "GPUS=1")


def test_the_port_to_meet_at_is_free():
    """The words that stand for it are a shell command."""
    done = make(ON_GPUS["wmt14"], "GPUS=2")
    (command,) = re.findall(r"tcp://localhost:(\$\(.*?\)\)\[1\]|\$\(.*?\[1\]\)'\))", done.stdout)
    port = subprocess.run(["bash", "-c", f"echo {command}"], capture_output=True, text=True)
    assert 1024 < int(port.stdout) < 65536, port.stderr


def test_each_cell_of_a_grid_has_a_gpu_of_its_own(nvidia_smi, tmp_path, monkeypatch):
    nvidia_smi((16384, "A"), (16384, "B"), (16384, "C"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    with one_gpu(tmp_path, 3) as first, one_gpu(tmp_path, 3) as second, one_gpu(tmp_path, 3) as third:
        assert [found["CUDA_VISIBLE_DEVICES"] for found in (first, second, third)] == ["2", "0", "2"]
    with one_gpu(tmp_path, 3) as again:
        assert again["CUDA_VISIBLE_DEVICES"] == "2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with one_gpu(tmp_path, 3) as hidden:
        assert hidden["CUDA_VISIBLE_DEVICES"] == ""


def test_installing_takes_no_notice_of_a_cuda_toolkit():
    """With CUDA_HOME fairseq-fixed compiles kernels with whatever toolkit it finds, and stops at another version."""
    done = subprocess.run(
        ["make", "-n", "VENV=nowhere/.venv", "setup"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "CUDA_HOME": "/usr/local/cuda"},
    )  # fmt: skip
    installs = [line for line in done.stdout.splitlines() if "-m pip install" in line]
    assert installs and all("env -u CUDA_HOME " in line for line in installs), done.stderr
