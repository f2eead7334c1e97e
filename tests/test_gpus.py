"""Which GPUs may a run use, and does a torch that cannot use them say so before hours of training on the CPU?"""

from __future__ import annotations

import re

import pytest
import torch

from recipes.steps import gpus

TESLAS = [gpus.Gpu(str(index), f"GPU-{index}", "Tesla V100", "535.104.05", 16 * 2.0**30) for index in range(2)]
WHEEL_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
WHEEL_12 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]


def test_cuda_visible_devices_chooses_in_its_order(nvidia_smi, monkeypatch):
    nvidia_smi((16384, "A"), (49152, "B"), (81920, "C"))
    assert [(gpu.name, round(gpu.memory / 1e9)) for gpu in gpus.visible()] == [("A", 17), ("B", 52), ("C", 86)]
    for wanted, names in {
        "2,0": "CA", "": "", "-1": "", "1": "B", " 1 , 2": "BC", "GPU-b": "B", "0,7,1": "A", "GPU-x,0": "",
    }.items():  # fmt: skip
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)
        assert "".join(gpu.name for gpu in gpus.visible()) == names, wanted
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1234")
    assert [(gpu.name, gpu.memory) for gpu in gpus.visible()] == [("MIG", None)]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    nvidia_smi((16384, "A"), status=9)
    assert gpus.visible() == []


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((7, 0), WHEEL_13, False),
        ((7, 0), WHEEL_12, True),
        ((6, 1), WHEEL_12, True),
        ((8, 9), WHEEL_13, True),
        ((12, 0), WHEEL_12, False),
        ((12, 0), [*WHEEL_12, "compute_90"], True),
        ((9, 0), ["sm_90a"], True),
    ],
)
def test_machine_code_runs_on_the_same_major_version_only(capability, architectures, runs):
    assert gpus.supported(capability, architectures) == runs


@pytest.fixture
def cuda(monkeypatch):
    """cuda(...) makes torch say that it is built so and sees such GPUs."""

    def pretend(built: str | None, count: int, capability=(7, 0), architectures=WHEEL_13):
        monkeypatch.setattr(torch.version, "cuda", built)
        monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: architectures)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "Tesla V100")

    return pretend


@pytest.mark.parametrize(
    ("torch_is", "precision", "message"),
    [
        ((None, 0), "fp16", r"built for CPUs only, and the run needs a GPU\. .*: make setup TORCH=cuda,"),
        (
            ("13.0", 0), "fp16",
            r"finds no GPU: it is built for CUDA 13\.0, which needs a driver of 580 or newer, and the driver here is "
            r"535\.104\.05\. .*: make setup TORCH=cu126$",
        ),
        (("12.6", 1, (7, 0), WHEEL_12), "fp16", r"finds 1 GPUs, and the run needs 2"),
        (("13.0", 2), "fp16", r"GPU 0 \(Tesla V100\) is sm_70, and torch .* is built for sm_75, .* TORCH="),
        (("12.6", 2, (7, 0), WHEEL_12), "bf16", r"has no bf16, .* take PRECISION=fp16"),
    ],
)  # fmt: skip
def test_the_wrong_torch_is_told_with_what_to_do(cuda, torch_is, precision, message):
    cuda(*torch_is)
    assert re.search(message, gpus.torch_fault(2, precision, TESLAS) or "")


def test_the_right_torch_trains(cuda):
    cuda("12.6", 2, (7, 0), WHEEL_12)
    assert gpus.torch_fault(2, "fp16", TESLAS) is None
    cuda("13.0", 1, (8, 9), WHEEL_13)
    assert gpus.torch_fault(1, "bf16", TESLAS[:1]) is None
