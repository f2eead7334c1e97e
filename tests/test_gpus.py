"""Which GPUs may a run use, and does a torch that cannot use them say so before hours of training on the CPU?"""

from __future__ import annotations

import re

import pytest
import torch

from recipes.steps import gpus


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


def test_a_torch_that_runs_on_no_gpu_says_so_in_a_line_with_what_to_do():
    """Of this environment: it is built for CPUs, or sees none."""
    assert re.fullmatch(
        r"torch \S+ does not run on 2 GPUs here \(.+\). Give GPUS=, .* TORCH=cu126 .*", gpus.fault(2, "fp16")
    )


@pytest.mark.cuda
def test_a_torch_that_runs_says_nothing():
    assert gpus.fault(1, "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16") == ""
