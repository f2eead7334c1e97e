"""`--optimizer radam`: parity with the published algorithm in float64, and fairseq's requirements of an optimizer."""

from __future__ import annotations

import copy
import math

import pytest
import reference
import torch
from fairseq import optim
from fairseq.optim import OPTIMIZER_REGISTRY, FairseqOptimizer, fp16_optimizer
from fairseq.optim.adam import FairseqAdamConfig
from fairseq.optim.amp_optimizer import AMPOptimizer
from fairseq.optim.fp16_optimizer import MemoryEfficientFP16Optimizer
from omegaconf import OmegaConf

from fairseq_admin import radam
from fairseq_admin.errors import AdminError
from fairseq_admin.fast.radam import FP16Optimizer
from fairseq_admin.radam import FairseqRAdam, RAdam, RAdamConfig
from fairseq_admin.rates import AdamByGroup, set_lr_group

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(autouse=True, params=[True, False], ids=["fused", "plain"])
def kernel(request, monkeypatch):
    """Run every test twice: with torch's fused kernel and with its RAdam."""
    monkeypatch.setattr(RAdam, "fused", request.param)


once = pytest.mark.parametrize("kernel", [True], indirect=True)
"""For tests that no kernel computes in."""


def parameters(dtype=torch.float32, shapes=((5, 4), (4,), (1,), (2, 3, 2))):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def gradients(params, step):
    """Gradients like a model's: of a different size for every parameter and step, with a constant part."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [
        (torch.randn(p.shape, generator=generator, dtype=torch.float64) + 0.3) * 10.0 ** (step % 3 - i)
        for i, p in enumerate(params)
    ]


def train(params, optimizer, steps):
    for step in steps:
        for p, g in zip(params, gradients(params, step)):
            p.grad = g.to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize("chunk", [2**22, 5])
@pytest.mark.parametrize(
    ("more", "scale", "dtype"),
    [
        ({}, 1.0, torch.float32),
        ({"betas": (0.9, 0.999), "eps": 0.1}, 3.0, torch.float32),
        ({"betas": (0.0, 0.9), "weight_decay": 0.0, "eps": 0.1}, torch.tensor(3.0), torch.float32),
        ({"eps": 0.1}, torch.tensor(64.0, dtype=torch.float64), torch.float32),
        ({"eps": 0.1}, 4.0, torch.float16),
        ({}, 1.0, torch.bfloat16),
    ],
)
def test_it_is_the_published_algorithm(more, scale, dtype, chunk, monkeypatch):
    """In float64, with two groups, loss scales (number or tensor) and missing gradients.

    A small epsilon would hide a wrong loss scale. With missing gradients, parameters take different numbers of steps.
    Parameters in half precision are cast a chunk at a time, and their state is float32.
    """
    monkeypatch.setattr(radam, "CHUNK", chunk)
    params, other = parameters(dtype), {"lr": 3e-2, "weight_decay": 0.0}
    settings = [{**SETTINGS, **more, **(other if i > 1 else {})} for i in range(len(params))]
    twins = [reference.PlainRAdam(p.detach(), **its) for p, its in zip(params, settings)]
    optimizer = RAdam([{"params": params[:2]}, {"params": params[2:], **other}], **settings[0])
    start, steps = [p.detach().clone() for p in params], 200 if dtype == torch.float32 else 40
    for step in range(steps):
        for i, (p, g) in enumerate(zip(params, gradients(params, step))):
            p.grad = (g * scale).to(dtype) if (True, step % 3 == 0, step >= 10, False)[i] else None
            if p.grad is not None:
                twins[i].step(p.grad.double() / scale)
        optimizer.step(scale=scale)
    taken = [steps, len(range(0, steps, 3)), steps - 10]
    assert [int(optimizer.state[p]["step"]) for p in params[:3]] == taken and params[3] not in optimizer.state
    for p, twin, initial in zip(params[:3], twins, start):
        state = optimizer.state[p]
        assert (p - initial).abs().max() > 0.01 and state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
        torch.testing.assert_close(state["exp_avg"].double(), twin.m, rtol=1e-5, atol=1e-6)
        # 200 float32 updates of at most lr each, rounded at the size of p (up to 3): at most 200 · 2e-7. In half
        # precision, each step rounds by half a unit in the last place of 2.
        atol = 1e-5 if dtype == torch.float32 else steps * torch.finfo(dtype).eps
        torch.testing.assert_close(p.double(), twin.value, rtol=1e-5, atol=atol)
    assert torch.equal(params[3], start[3])


def test_a_closure_computes_the_gradients():
    """As in torch's optimizers, is the closure called once, with gradients enabled, and its loss returned?"""
    params, others = parameters(), parameters()
    optimizer, other = RAdam(params, **SETTINGS), RAdam(others, **SETTINGS)

    def loss_of(tensors):
        loss = sum(p.square().sum() for p in tensors)
        for p, g in zip(tensors, torch.autograd.grad(loss, tensors)):
            p.grad = g
        return loss

    for _ in range(8):
        assert torch.equal(optimizer.step(lambda: loss_of(params)), loss_of(others)) and other.step() is None
    assert all(map(torch.equal, params, others)) and loss_of(params) < loss_of(parameters())


def half_config(scale=1, bf16=False, fast="on"):
    """fairseq's configuration for its half-precision wrappers."""
    optimizer = {"adam_betas": "(0.9, 0.98)", "adam_eps": 1e-8, "lr": [1e-2], "weight_decay": 0.1}
    common = {"fp16_init_scale": scale, "fp16_scale_tolerance": 0.0, "fp16_no_flatten_grads": True}
    common |= {"min_loss_scale": 1e-4, "threshold_loss_scale": None, "fp16_scale_window": 1000, "bf16": bf16}
    others = {
        "model": {"admin_fast": fast},
        "distributed_training": {"distributed_world_size": 1},
        "optimization": {"update_freq": [1]},
    }
    return OmegaConf.create({"optimizer": {"_name": "radam", **optimizer}, "common": common, **others})


def memory_efficient(params, **_):
    """fairseq's --memory-efficient-fp16 around our optimizer, with loss scale 1."""
    return MemoryEfficientFP16Optimizer(half_config(), params, handled(FairseqRAdam, params))


def train_half(wrapper, steps, frozen=()):
    """Train as fairseq's trainer does. In step 3 a parameter has no gradient; in step 5 a gradient overflows."""
    params = wrapper.fp16_params
    for step in steps:
        for i, p in enumerate(params):
            p.requires_grad_(not (step >= 8 and i in frozen))
        wrapper.zero_grad()
        used = [p for i, p in enumerate(params) if p.requires_grad and not (step == 3 and i == 2)]
        loss = sum((p * g.to(p.dtype)).sum() for p, g in zip(used, gradients(used, step)))
        wrapper.backward(loss * float("inf") if step == 5 else loss)
        wrapper.multiply_grads(0.25)
        try:
            wrapper.clip_grad_norm(1.0)
            wrapper.step()
        except OverflowError:
            continue


@pytest.mark.parametrize("frozen", [(), (1,)])
def test_fp16_that_is_not_flat_is_copied_at_once(frozen):
    """Does our wrapper match fairseq's, bit for bit, with missing gradients, overflows and a resume?"""
    results = []
    for kind in (fp16_optimizer.FP16Optimizer, FP16Optimizer):
        params = parameters(torch.float16)
        wrapper = kind.build_optimizer(half_config(scale=128), params)
        train_half(wrapper, range(7))
        saved, loss_scale = copy.deepcopy(wrapper.state_dict()), wrapper.scaler.loss_scale
        wrapper = kind.build_optimizer(half_config(scale=1), params)
        wrapper.load_state_dict(saved)
        train_half(wrapper, range(7, 20), frozen)
        assert wrapper.scaler.loss_scale == loss_scale == 64
        moments = [wrapper.optimizer.state[p][name] for p in wrapper.fp32_params for name in ("exp_avg", "exp_avg_sq")]
        wrapper.zero_grad()
        wrapper._sync_fp16_grads_to_fp32()  # as in a step that follows no backward
        zeros = [p.grad for p in wrapper.fp32_params]
        assert all(p.grad is None for p in params) and not any(zero.any() for zero in zeros)
        results.append([*params, *wrapper.fp32_params, *moments])
    assert all(map(torch.equal, *results))
    assert kind.__name__ == fp16_optimizer.FP16Optimizer.__name__  # fairseq compares it when it resumes


@pytest.mark.parametrize("kind", [fp16_optimizer.FP16Optimizer, FP16Optimizer, MemoryEfficientFP16Optimizer])
def test_bf16_goes_on_learning(kind):
    """Is each update's gradient scaled by its own number of tokens, not by an earlier update's?"""
    (p,) = params = [torch.ones(64, dtype=torch.bfloat16).requires_grad_()]
    wrapper = kind.build_optimizer(half_config(bf16=True), params)
    for _ in range(40):
        wrapper.zero_grad()
        wrapper.backward(500 * p.float().square().sum())
        wrapper.multiply_grads(1 / 500)
        norm = wrapper.clip_grad_norm(1.0)
        assert norm == pytest.approx(2 * p.float().norm().item(), rel=0.01)
        wrapper.step()
    assert p.float().mean() < 0.9


def test_only_fast_models_have_our_fp16_wrapper(monkeypatch):
    monkeypatch.setattr(optim, "FP16Optimizer", fp16_optimizer.FP16Optimizer)
    kinds = []
    for fast in ("off", "on"):
        reference.build("transformer_admin", dropout=0.0, encoder_layers=1, decoder_layers=1, admin_fast=fast)
        assert (optim.FP16Optimizer is FP16Optimizer) == (fast == "on")
    for fast in ("off", "on", "on"):  # the last one is built after the fast model got its wrapper
        wrapper = optim.FP16Optimizer.build_optimizer(half_config(fast=fast), parameters(torch.float16))
        kinds.append(type(wrapper) is FP16Optimizer)
    assert kinds == [False, True, False] and optim.FP16Optimizer is fp16_optimizer.FP16Optimizer


@pytest.mark.parametrize(
    ("make", "dtype"),
    [(RAdam, torch.float32), (RAdam, torch.float16), (memory_efficient, torch.float16)],
)
@pytest.mark.parametrize("split", [4, 20])
def test_a_resumed_optimizer_goes_on_bit_for_bit(split, make, dtype):
    """Does it resume bit for bit, whatever the new optimizer's settings, and up to rounding with the other kernel?"""
    whole = parameters(dtype)
    train(whole, make(whole, **SETTINGS), range(40))
    for fused in (RAdam.fused, not RAdam.fused):
        params = parameters(dtype)
        optimizer = make(params, **SETTINGS)
        train(params, optimizer, range(split))
        state, weights = copy.deepcopy((optimizer.state_dict(), params))
        optimizer = make(params, lr=9, betas=(0.5, 0.5), eps=1, weight_decay=9)
        train(params, optimizer, range(3))  # its own state is replaced
        optimizer.load_state_dict(state)
        torch._foreach_copy_([p.data for p in params], weights)
        getattr(optimizer, "optimizer", optimizer).fused = fused
        train(params, optimizer, range(split, 40))
        assert fused != RAdam.fused or all(map(torch.equal, whole, params))
        for p, q in zip(whole, params):
            # At most 36 updates of at most 1e-2 each, rounded to the parameter's type.
            torch.testing.assert_close(p, q, rtol=1e-5 if dtype == torch.float32 else 36 * 2**-11, atol=1e-6)


def test_memory_efficient_fp16_divides_by_the_loss_scale_in_float32():
    """Do gradients count that become too small for float16 once divided by the loss scale and a batch's tokens?"""
    scale, tokens = 128.0, 32768
    for gradient in (2e-8, 1e-7, 1e-4):
        (p,) = params = [torch.ones(5, dtype=torch.float16).requires_grad_()]
        optimizer = memory_efficient(params)
        optimizer.scaler.loss_scale = scale
        optimizer.zero_grad()
        p.grad = torch.full_like(p, gradient * scale * tokens)
        optimizer.multiply_grads(1 / tokens)
        optimizer.clip_grad_norm(0.0)
        optimizer.step()
        # The rest is one rounding of the incoming gradient.
        moment = optimizer.wrapped_optimizer.optimizer.state[p]["exp_avg"]
        assert moment.tolist() == pytest.approx([0.1 * gradient] * 5, rel=2**-11)


def handled(handle, params):
    config = {FairseqRAdam: RAdamConfig, AdamByGroup: FairseqAdamConfig}[handle]
    return handle(config(adam_betas="(0.9, 0.98)", lr=[1e-2], weight_decay=0.1), params)


def amp(handle, params, scale=4096.0):
    """fairseq's --amp around an optimizer, with a scaler that works on the CPU (fairseq's is disabled there)."""
    cfg = {"optimizer": {}, "common": {"fp16_init_scale": scale, "min_loss_scale": 1e-4, "amp_scale_window": None}}
    optimizer = AMPOptimizer(OmegaConf.create(cfg), params, handled(handle, params))
    if params[0].is_cpu:
        optimizer._grad_scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return optimizer


def train_amp(params, optimizer, steps, clip_norm=0.0, overflow=()):
    """Train with gradients through the scaler. In overflowing steps, one gradient is infinite."""
    for step in steps:
        optimizer.zero_grad()
        loss = sum((p * g.to(p)).sum() for p, g in zip(params, gradients(params, step)))
        optimizer.backward(loss * float("inf") if step in overflow else loss)
        optimizer.clip_grad_norm(clip_norm)
        optimizer.step()


def assert_amp_is_float32(handle, clip_norm, place=lambda p: p):
    """Do gradients, moments and parameters equal float32's, bit for bit, as if overflowing steps had not happened?

    A scale of 2^12 only changes exponents.
    """
    params, others = ([place(p.detach()).requires_grad_() for p in parameters()] for _ in range(2))
    optimizer, other = amp(handle, params), handled(handle, others)
    for step in range(20):
        train_amp(params, optimizer, [step], clip_norm, overflow=[8])
        assert optimizer.scaler.get_scale() == (4096 if step < 8 else 2048)
        if step == 8:
            continue
        for p, g in zip(others, gradients(others, step)):
            p.grad = g.to(p)
        other.clip_grad_norm(clip_norm)
        other.step()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(params, others))
    for p, q in zip(params, others):
        ours, expected = optimizer.optimizer.state[p], other.optimizer.state[q]
        assert torch.equal(p, q) and int(ours["step"]) == int(expected["step"]) == 19
        assert all(torch.equal(ours[key], expected[key]) for key in ("exp_avg", "exp_avg_sq"))


both = pytest.mark.parametrize("handle", [FairseqRAdam, AdamByGroup])
"""Our optimizers, which support groups with their own learning rate."""


@both
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_amp_unscales_once(clip_norm, handle):
    assert_amp_is_float32(handle, clip_norm)


@both
@pytest.mark.parametrize("make", [handled, amp])
def test_a_resumed_run_has_its_own_shares(make, handle):
    """Does a resumed run take moments and rate from the checkpoint, but keep its own groups' shares of the rate?

    Is a checkpoint with other groups refused?

    (--amp loads the state without our handle.)
    """
    optimizers = []
    for factor in (0.008, 0.5, None):
        slow, fast = parameters()[:2]
        if factor:
            set_lr_group([slow], "pretrained", factor)
        optimizers.append(make(handle, [slow, fast]))
        optimizers[-1].set_lr(4e-4)
        (train_amp if make is amp else train)([slow, fast], optimizers[-1], range(3))
    saved, resumed, whole = optimizers
    resumed.set_lr(1.0)
    resumed.load_state_dict(saved.state_dict())
    resumed.set_lr(resumed.get_lr())
    assert [group["lr"] for group in resumed.param_groups] == pytest.approx([4e-4, 2e-4])
    moments = [[state["exp_avg"] for state in wrapped.optimizer.state.values()] for wrapped in (saved, resumed)]
    assert len(moments[1]) == 2 and all(map(torch.equal, *moments))
    for one, other in ((whole, saved), (saved, whole)):
        with pytest.raises(AdminError, match="--pretrained-lr-factor.* give --reset-optimizer"):
            one.load_state_dict(other.state_dict())


def test_loaded_state_is_where_the_parameters_are_under_memory_efficient_fp16():
    """Is a checkpoint's state, read to the CPU, moved to the device? (The meta device stands in for a GPU.)"""
    params = parameters(torch.float16)
    optimizer = memory_efficient(params)
    train(params, optimizer, [0])
    elsewhere = [torch.empty_like(p, device="meta").requires_grad_() for p in params]
    resumed = memory_efficient(elsewhere)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    moments = [resumed.optimizer.state[p][name] for p in elsewhere for name in ("exp_avg", "exp_avg_sq")]
    assert all(moment.device.type == "meta" and moment.dtype == torch.float32 for moment in moments)


@pytest.mark.parametrize("sizes", [[(3,)], [(3,), (5,)], [(3,), (4,), (5,)]])
def test_state_of_other_parameters_is_refused(sizes):
    """Is a state refused if it has another number of parameters or, as after flattening, parameters of another size?"""
    params, others = parameters(shapes=[(3,), (4,)]), parameters(shapes=sizes)
    optimizer = RAdam(others, **SETTINGS)
    train(others, optimizer, [0])
    here = "of other shapes than this run's" if len(sizes) == 2 else "and this run's of 2 "
    with pytest.raises(AdminError, match=f"is of {len(sizes)} tensors *{here}.* [Gg]ive --reset-optimizer"):
        RAdam(params, **SETTINGS).load_state_dict(optimizer.state_dict())


@once
@pytest.mark.parametrize("betas", ["(0.8, 0.99)", "0.8, 0.99", (0.8, 0.99), ["0.8", "0.99"]])
def test_options_reach_the_optimizer(betas):
    config = RAdamConfig(lr=[1e-3], adam_betas=betas, adam_eps=1e-6, weight_decay=0.2)
    handle = FairseqRAdam(config, parameters())
    (group,) = handle.optimizer.param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (1e-3, (0.8, 0.99), 1e-6, 0.2)
    assert OPTIMIZER_REGISTRY["radam"] is FairseqRAdam and handle.supports_flat_params
    handle.set_lr(5e-4)
    assert handle.get_lr() == 5e-4


@once
@pytest.mark.parametrize(
    ("option", "values", "message"),
    [
        (
            "adam_betas",
            ["0.9", "(0.9, 0.98, 0.1)", "beta", None],
            r"two numbers were expected, e\.g\. '\(0\.9, 0\.98\)'",
        ),
        # With beta2 = 0.66, rho_t never exceeds 5: no step.
        (
            "adam_betas",
            ["(0.9, 1.0)", "(-0.1, 0.98)", "(0.9, 0.66)"],
            "expected beta1 from 0 to 1 and beta2 from 2/3 to 1",
        ),
        ("adam_eps", [-1.0, math.nan], "a number of at least 0 was expected"),
        ("weight_decay", [math.inf], "a number of at least 0 was expected"),
    ],
)
def test_wrong_options_are_refused(option, values, message):
    for value in values:
        with pytest.raises(AdminError, match=f"--{option.replace('_', '-')} is .*; {message}"):
            FairseqRAdam(RAdamConfig(lr=[1e-3], **{option: value}), parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("limit", [0.0, 1.0, 1e6])
def test_clips_as_fairseq(limit, dtype):
    """Up to rounding, norm and clipped gradients equal fairseq's. Half-precision numbers are summed in float32."""
    results = []
    for clip in (FairseqOptimizer.clip_grad_norm, FairseqRAdam.clip_grad_norm):
        torch.manual_seed(1)
        handle = handled(FairseqRAdam, [torch.zeros(size, dtype=dtype) for size in (300, 7, 40, *[1] * 20)])
        for i, p in enumerate(handle.params):
            p.grad = None if i == 1 else 60 * torch.randn_like(p)
        norm = clip(handle, limit)
        assert norm.dtype == torch.float32 and norm > 500
        results.append([norm, *(p.grad for p in handle.params if p.grad is not None)])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-6 if dtype == torch.float32 else 0, atol=0)
