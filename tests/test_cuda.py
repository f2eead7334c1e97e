"""What only a GPU can show, except the modes of training (test_modes.py) and the stop (test_divergence.py)."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import conftest
import pytest
import reference
import torch
from test_radam import assert_same_training, gradients, handled
from torch import Tensor

from fairseq_admin.radam import FairseqRAdam


def _sees(log: Path) -> None:
    """Write down which GPUs a process is told of, and how many fairseq counts."""
    from fairseq.dataclass.configs import DistributedTrainingConfig

    log.write_text(f"{os.environ['CUDA_VISIBLE_DEVICES']!r} {DistributedTrainingConfig().distributed_world_size}")


def test_only_what_is_marked_cuda_sees_a_gpu(tmp_path: Path) -> None:
    """Do a test's process, and fairseq in it, see no GPU, wherever the tests run?"""
    assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
    process = conftest.process(_sees, tmp_path / "log")
    process.start()
    process.join(60)
    assert (tmp_path / "log").read_text() == "'' 1"


@pytest.mark.cuda
def test_a_test_marked_cuda_sees_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Does its process have the first GPU, counted again?"""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    process = conftest.process(_sees, tmp_path / "log")
    process.start()
    process.join(120)
    assert torch.cuda.is_available() and (tmp_path / "log").read_text() == "'0' 1"


def amp(params: list[Tensor], scale: float):
    """fairseq's --amp around our optimizer, as fairseq makes it."""
    from fairseq.optim.amp_optimizer import AMPOptimizer
    from omegaconf import OmegaConf

    cfg = {"optimizer": {}, "common": {"fp16_init_scale": scale, "min_loss_scale": 1e-4, "amp_scale_window": None}}
    return AMPOptimizer(OmegaConf.create(cfg), params, handled(FairseqRAdam, params))


@pytest.mark.cuda
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_amp_unscales_once_on_cuda(clip_norm: float) -> None:
    """Are gradients, moments and parameters those of float32, bit for bit? (A scale of 2^12 only moves exponents.)"""

    def parameters() -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(n, generator=generator).cuda().requires_grad_() for n in (33, 4, 1, 12)]

    params, others = parameters(), parameters()
    optimizer, other = amp(params, 4096.0), handled(FairseqRAdam, others)
    for step in range(20):
        given = [g.float().cuda() for g in gradients(others, step)]
        optimizer.zero_grad()
        optimizer.backward(sum((p * g).sum() for p, g in zip(params, given)))
        optimizer.clip_grad_norm(clip_norm)
        optimizer.step()
        for p, g in zip(others, given):
            p.grad = g
        other.clip_grad_norm(clip_norm)
        other.step()
    assert_same_training(params, optimizer.optimizer, others, other.optimizer)


@pytest.mark.cuda
def test_gradients_of_a_model_under_amp() -> None:
    """Do the gradients that reach radam under --amp differ from those of float32 by float16's roundings only?"""
    options = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    batch = [part.cuda() for part in reference.batch()]
    found = []
    for cast in (False, True):
        model = reference.build("transformer_admin", seed=1, **{**reference.TINY, **options}).cuda()
        params = list(model.parameters())
        optimizer = amp(params, 4096.0) if cast else handled(FairseqRAdam, params)
        with torch.autocast("cuda", enabled=cast):
            loss = model(*batch)[0].float().log_softmax(-1)[..., 5].mean()
        optimizer.backward(loss)
        optimizer.clip_grad_norm(0.0)
        found.append(torch.cat([p.grad.flatten() for p in params if p.grad is not None]))
        assert isinstance(getattr(optimizer, "fp32_optimizer", optimizer), FairseqRAdam)
        optimizer.step()
    plain, cast = found
    # A hundred roundings of 2^-11 on the way, all in one direction at the very worst, which they are not.
    assert plain.norm() > 0 and (plain - cast).norm() < 100 * 2**-11 * plain.norm()


def test_what_no_gpu_has_seen_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do the two above say what they should of a CPU that is taken for the GPU? (Else the first GPU would find out.)"""
    for kind in (Tensor, torch.nn.Module):
        monkeypatch.setattr(kind, "cuda", lambda self: self)
    monkeypatch.setattr(torch.cuda.amp, "GradScaler", partial(torch.amp.GradScaler, "cpu"))
    half = partial(torch.autocast, "cpu", torch.float16)
    monkeypatch.setattr(torch, "autocast", lambda kind, **options: half(**options))
    test_amp_unscales_once_on_cuda(1.0)
    test_gradients_of_a_model_under_amp()
