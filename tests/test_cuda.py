"""Tests that need a GPU. Training modes on one and two GPUs are in test_modes.py, divergence in test_divergence.py."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from fairseq.trainer import Trainer
from post_ln import QUIET, build, output
from recorded import recording_without_gpu
from test_fast_loss import DTYPES, assert_is_fairseqs
from test_modes import QUICK, last, train, two_processes
from test_radam import amp, assert_amp_is_float32, gradients, handled
from torch import Tensor

import fairseq_admin.pytorch as admin
from fairseq_admin.fast import graphs, loss
from fairseq_admin.fast.attention import FastAttention
from fairseq_admin.method import provenance
from fairseq_admin.radam import FairseqRAdam
from recipes.research.bench.step import batches, trainer


@pytest.mark.cuda
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_amp_unscales_once_on_cuda(clip_norm: float) -> None:
    assert_amp_is_float32(FairseqRAdam, clip_norm, lambda p: p.cuda())


@pytest.mark.cuda
def test_gradients_of_a_model_under_amp() -> None:
    """Under --amp, do the gradients of radam's step differ from float32's gradients by float16's roundings only?"""
    options = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    batch = [part.cuda() for part in reference.batch()]
    results = []
    for cast in (False, True):
        model = reference.build("transformer_admin", seed=1, **{**reference.TINY, **options}).cuda()
        params = list(model.parameters())
        optimizer = amp(FairseqRAdam, params) if cast else handled(FairseqRAdam, params)
        with torch.autocast("cuda", enabled=cast):
            loss = model(*batch)[0].float().log_softmax(-1)[..., 5].mean()
        optimizer.backward(loss)
        optimizer.clip_grad_norm(0.0)
        assert isinstance(getattr(optimizer, "fp32_optimizer", optimizer), FairseqRAdam)
        optimizer.step()  # otherwise the scaler would divide them again
        results.append(torch.cat([p.grad.flatten() for p in params if p.grad is not None]))
    plain, cast = results
    # The bound allows a hundred roundings of 2^-11, all in one direction. The real error is smaller.
    assert plain.norm() > 0 and 0 < (plain - cast).norm() < 100 * 2**-11 * plain.norm()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["admin", "post-ln"])
def test_fast_gradients_on_cuda(scheme: str, dtype: torch.dtype) -> None:
    """Up to rounding, do loss and gradients equal the plain layers'? Heads have 64 channels, and targets 40 words.

    Queries are checked separately: they have 3 % of the norm, which bfloat16's roundings would hide.
    """
    sizes = {f"{side}_{name}": 256 for side in ("encoder", "decoder") for name in ("embed_dim", "ffn_embed_dim")}
    options = {"admin_scheme": scheme, "dropout": 0.0, "attention_dropout": 0.0, "activation_fn": "relu", **sizes}
    if scheme == "admin":
        options["admin_init"] = "log"
    batch = [part.cuda() for part in reference.batch(source=43, target=40)]
    results = []
    for layers in ("on", "off"):
        model = reference.build("transformer_admin_tiny", admin_fast=layers, **options).cuda().to(dtype)
        assert any(isinstance(module, FastAttention) for module in model.modules()) == (layers != "off")
        lprobs = model(*batch)[0].float().log_softmax(-1)
        weights = torch.linspace(-1, 1, lprobs.size(-1), device=lprobs.device)
        loss = (lprobs * weights).sum(-1)[batch[2].ne(reference.PAD)].mean()
        loss.backward()
        grads = {name: p.grad.flatten().float() for name, p in model.named_parameters()}
        queries = torch.cat([gradient for name, gradient in grads.items() if "q_proj" in name])
        results.append((torch.cat([loss.detach().view(1), *grads.values()]), queries))
    # About twenty roundings, including those of float32 products (torch turns TF32 off by default).
    for fast, expected in zip(*results):
        assert expected.norm() > 0
        assert (fast - expected).norm() < 20 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_on_cuda(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Does the loss equal fairseq's if it is computed in several chunks and the last chunk is not full?"""
    monkeypatch.setattr(loss, "CHUNK", dict.fromkeys(loss.CHUNK, 104 * 5))
    assert_is_fairseqs(0.1, dtype, "cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fused_radam_on_cuda(dtype: torch.dtype) -> None:
    """Does torch's fused kernel match its RAdam, with a loss scale and clipping, before and after the sixth step?"""
    results = []
    for fused in (True, False):
        generator = torch.Generator().manual_seed(1)
        sizes = (70000, 33, 4, 1)
        params = [torch.randn(n, generator=generator).to(dtype).cuda().requires_grad_() for n in sizes]
        handle = handled(FairseqRAdam, params)
        handle.optimizer.fused = fused
        for step in range(12):
            for p, g in zip(params, gradients(params, step)):
                p.grad = (g * 16).to(dtype).cuda()
            norm = handle.clip_grad_norm(1e3)
            handle.step(scale=torch.tensor(16.0).cuda() if step % 2 else 16.0)
        state = handle.optimizer.state
        assert all(int(state[p]["step"]) == 12 for p in params)
        tensors = [norm, *params, *(state[p][name] for p in params for name in ("exp_avg", "exp_avg_sq"))]
        results.append(torch.cat([tensor.detach().float().flatten() for tensor in tensors]))
    torch.testing.assert_close(*results, rtol=1e-5 if dtype == torch.float32 else 2**-10, atol=1e-6)


STEPS = ("--lr", "1e-3", "--admin-init", "reference", "--log-interval", "4")


def small_trainer(method: str) -> Trainer:
    """A trainer of a small model whose ω is profiled and whose monitor measures one step in four."""
    made = trainer(method, 92, (2, 2), 16, "--fp16" if torch.cuda.is_available() else "--cpu", *STEPS)
    made.cuda_env = None
    return made


def weights_of(made: Trainer) -> Tensor:
    return torch.cat([p.detach().float().flatten() for p in made.model.parameters()])


def assert_trained_alike(start: Tensor, recorded: Tensor, computed: Tensor) -> None:
    assert (computed - start).norm() > 0.1
    tolerance = 0.02 if torch.cuda.is_available() else 1e-5
    assert (recorded - computed).norm() < tolerance * (computed - start).norm()


@pytest.mark.cuda
def test_recorded_steps_train_as_computed_ones() -> None:
    """Do recorded and computed steps give equal weights, with dropout, several shapes, and two batches per update?

    Of the two batches one may be replayed and the other computed, in either order. A step that a hook or the monitor
    watches is computed, and so reaches them.
    """
    samples = list(batches(64, 92, range(12, 44, 8)))
    weights = []
    for method in ("graph", "fast"):
        made = small_trainer(method)
        weights.append(weights_of(made))
        for numbers in 3 * ((0, 1), (1, 2), (0,), (3, 0)):
            made.train_step([samples[number] for number in numbers])
            assert not made.model.monitor.due
        weights.append(weights_of(made))
        calls: list[int] = []
        made.model.encoder.layers[0].fc1.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        made.train_step(samples[:1])
        assert calls == [1] and made.get_num_updates() == 13
        if method == "graph":
            assert [pair is not None for pair in made.criterion.steps.pairs.values()] == [True] * 4
            assert made.model.monitor.shown  # the monitor has measured
    assert_trained_alike(weights[0], weights[1], weights[3])


@pytest.mark.cuda
@pytest.mark.parametrize("memory", [True, False])
def test_a_failed_recording_changes_nothing(
    memory: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If a shape cannot be recorded, are its steps and other shapes' recorded steps as with computed ones?"""
    samples = list(batches(64, 92, range(12, 28, 8)))

    class Fails(graphs._Pair):
        """For the first shape, runs out of memory or reads a tensor's value, which no graph can record."""

        def __init__(self, losses_of: Callable[..., Any], batch: dict[str, Tensor], steps: Any) -> None:
            def broken(**batch: Tensor) -> Any:
                if torch.cuda.is_available():
                    losses = losses_of(**batch)
                    torch.empty(2**50, device="cuda") if memory else losses[0].item()
                raise torch.cuda.OutOfMemoryError("memory") if memory else RuntimeError("invalid")

            first = batch["target"].shape == samples[0]["target"].shape
            super().__init__(broken if first else losses_of, batch, steps)
            if first:
                self.replay_forward()  # the CPU's stand-in fails here

    weights = []
    with caplog.at_level(logging.WARNING):
        for method in ("graph", "fast"):
            made = small_trainer(method)
            weights.append(weights_of(made))
            with monkeypatch.context() as patch:
                patch.setattr(graphs, "_Pair", Fails)
                for numbers in 3 * ((0,), (1, 0), (1,), (0, 1)):
                    made.train_step([samples[number] for number in numbers])
            weights.append(weights_of(made))
            if method == "graph":
                assert [pair is not None for pair in made.criterion.steps.pairs.values()] == [False, True]
    assert sum("are computed, not replayed" in record.getMessage() for record in caplog.records) == 1
    assert not torch.cuda.is_available() or torch.cuda.current_stream() == torch.cuda.default_stream()
    assert_trained_alike(weights[0], weights[1], weights[3])


def test_says_why_steps_are_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    """Does the log name, once, every reason why `--admin-fast graph` computes its steps?"""
    options = ("--encoder-layerdrop", "0.5", "--checkpoint-activations", "--report-accuracy")
    made = trainer("graph", 92, (1, 1), 16, "--cpu", *options)
    with caplog.at_level(logging.INFO):
        for sample in 2 * list(batches(64, 92, [12])):
            made.train_step([sample])
    lines = [record.getMessage() for record in caplog.records if "not recorded" in record.getMessage()]
    reasons = "the CPU, layerdrop, --checkpoint-activations, --report-accuracy"
    assert lines == [f"Admin: --admin-fast graph: steps are not recorded, because of {reasons}"]


@pytest.mark.cuda
@pytest.mark.parametrize("name", QUIET)
def test_attached_on_cuda(name: str) -> None:
    """Do the weights after three steps and the fold equal the CPU's, and does the fold hold under autocast?"""
    outputs_by_device = []
    for there in (False, True):
        model, batch = build(name, **QUIET[name])
        if there:
            model, batch = model.cuda(), {key: value.cuda() for key, value in batch.items()}
        admin.attach(model, batch)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(3):
            optimizer.zero_grad()
            output(model, batch).square().mean().backward()
            optimizer.step()
        model.eval()
        outputs = []
        for fold in (False, True):
            if fold:
                admin.fold(model, batch)
            with torch.autocast("cuda", enabled=there):
                half = output(model, batch).detach()
            outputs.append((output(model, batch).detach(), half.double()))
        assert outputs[0][0].is_cuda == (there and torch.cuda.is_available())
        (attached, rounded), (folded, folded_rounded) = outputs
        assert (attached - folded).abs().max() < 1e-12  # a few sub-layers, each with a few roundings
        assert (rounded - folded_rounded).abs().max() < 0.02 * attached.abs().max()
        outputs_by_device.append(attached.detach().double().cpu())
    torch.testing.assert_close(*outputs_by_device, rtol=1e-6, atol=1e-9)


LEARNS = "--optimizer sgd --lr 0.05 --dropout 0 --attention-dropout 0 --max-tokens 150 --max-update 3".split()


@pytest.mark.slow
def test_two_processes_have_the_gradients_of_one(corpus: Path, tmp_path: Path) -> None:
    """After three steps, two processes over gloo have the weights of one with twice the batches per update."""
    two_processes(corpus, [tmp_path / "two", tmp_path / "other"], *LEARNS)
    train(corpus, tmp_path / "one", *QUICK, *LEARNS, "--update-freq", 2)
    weights, expected = (last(tmp_path / name)["model"] for name in ("two", "one"))
    for name, weight in expected.items():
        if not name.endswith(provenance.KEY):  # it counts the first device's own tokens
            torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-5, msg=name)


TESTS_OF_KERNELS = [
    partial(test_amp_unscales_once_on_cuda, 1.0),
    test_gradients_of_a_model_under_amp,
    *(partial(test_fast_gradients_on_cuda, "admin", dtype) for dtype in (torch.float32, torch.float16)),
    partial(test_fast_gradients_on_cuda, "post-ln", torch.bfloat16),
    test_recorded_steps_train_as_computed_ones,
    partial(test_fused_radam_on_cuda, torch.float32),
    partial(test_fused_radam_on_cuda, torch.float16),
    *(partial(test_attached_on_cuda, name) for name in QUIET),
]


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretend that the CPU is a GPU, so that the code for GPUs runs."""
    for kind in (Tensor, torch.nn.Module):
        monkeypatch.setattr(kind, "cuda", lambda self: self)
    monkeypatch.setattr(torch.cuda.amp, "GradScaler", partial(torch.amp.GradScaler, "cpu"))
    half = partial(torch.autocast, "cpu", torch.float16)
    monkeypatch.setattr(torch, "autocast", lambda kind, **options: half(**options))
    with recording_without_gpu():
        yield


@pytest.mark.parametrize("test", TESTS_OF_KERNELS)
def test_what_no_gpu_has_seen_runs(test: Callable[[], None], faked: None) -> None:
    """Do the tests above run here? (Otherwise, their mistakes would only show on a GPU.)"""
    test()


@pytest.mark.parametrize("memory", [True, False])
def test_a_failed_recording_changes_nothing_here(
    memory: bool, faked: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    test_a_failed_recording_changes_nothing(memory, monkeypatch, caplog)
