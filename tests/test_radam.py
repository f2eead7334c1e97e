"""`--optimizer radam` against the published algorithm in float64, and what fairseq asks of an optimizer."""

from __future__ import annotations

import copy
import math
import subprocess
import sys

import pytest
import reference
import torch
from fairseq import optim
from fairseq.optim import OPTIMIZER_REGISTRY, FairseqOptimizer, fp16_optimizer
from fairseq.optim.adam import FairseqAdamConfig
from fairseq.optim.amp_optimizer import AMPOptimizer
from fairseq.optim.fp16_optimizer import MemoryEfficientFP16Optimizer
from omegaconf import OmegaConf
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_admin import radam
from fairseq_admin.errors import AdminError
from fairseq_admin.fast.radam import FP16Optimizer
from fairseq_admin.radam import FairseqRAdam, RAdam, RAdamConfig
from fairseq_admin.rates import AdamByGroup, slow_down
from recipes.bench.counting import Operations

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}
STEPS = 200


@pytest.fixture(autouse=True, params=[True, False], ids=["fused", "plain"])
def way(request, monkeypatch):
    """Every test twice: with torch's fused kernel and with its RAdam."""
    monkeypatch.setattr(RAdam, "fused", request.param)


def parameters(dtype=torch.float64, flat=False):
    generator = torch.Generator().manual_seed(1)
    shapes = [(33,)] if flat else [(5, 4), (4,), (1,), (2, 3, 2)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def gradients(params, step):
    """Like a model's: a different size for every parameter and step, with a constant part."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [
        (torch.randn(p.shape, generator=generator, dtype=torch.float64) + 0.3) * 10.0 ** (step % 3 - i)
        for i, p in enumerate(params)
    ]


def plain(params, settings):
    return [reference.PlainRAdam(p.detach(), **settings) for p in params]


def train(params, optimizer, steps, twins=()):
    for step in steps:
        for p, g in zip(params, gradients(params, step)):
            p.grad = g.to(p.dtype)
        optimizer.step()
        for p, twin in zip(params, twins):
            twin.step(p.grad)


@pytest.mark.parametrize(
    ("more", "sizes"),
    [
        ({}, "several"),
        ({"betas": (0.9, 0.999)}, "several"),
        ({"betas": (0.0, 0.9), "weight_decay": 0.0}, "several"),
        ({}, "flat"),
        ({"eps": 0.1}, "several"),
        ({}, "groups"),
    ],
)
def test_against_plain_float64(more, sizes):
    settings = {**SETTINGS, **more}
    params = parameters(torch.float32, sizes == "flat")
    given, first = params, len(params)
    if sizes == "groups":
        other, first = {"lr": 1e-3, "weight_decay": 0.0}, 2
        given = [{"params": params[:first]}, {"params": params[first:], **other}]
    twins = plain(params[:first], settings)
    twins += plain(params[first:], {**settings, **other}) if sizes == "groups" else []
    start = [p.detach().clone() for p in params]
    train(params, RAdam(given, **settings), range(STEPS), twins)
    for p, twin, before in zip(params, twins, start):
        assert (p - before).abs().max() > 0.01
        # 200 float32 updates of at most lr each, rounded to the size of p (up to 3): 200 · 2e-7 at the very most.
        assert torch.allclose(p.double(), twin.value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_only_decay_while_intractable(weight_decay):
    """ρ_∞ = 99; ρ_5 = 99 - 10 · 0.98^5 / (1 - 0.98^5) = 99 - 10 · 0.9039208 / 0.0960792 = 4.919; ρ_6 = 5.88."""
    params = parameters(torch.float32)
    start = [p.detach().clone() for p in params]
    optimizer = RAdam(params, **{**SETTINGS, "weight_decay": weight_decay})
    train(params, optimizer, range(5))
    for p, before in zip(params, start):
        # Five products in float32.
        assert torch.allclose(p, before * (1 - 1e-2 * weight_decay) ** 5, rtol=1e-6, atol=0)
        assert weight_decay or torch.equal(p, before)
    train(params, optimizer, range(5, 6))
    assert not any(torch.allclose(p, before * (1 - 1e-2 * weight_decay) ** 6) for p, before in zip(params, start))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_parameters_keep_float_state(dtype):
    params = parameters(dtype)
    floats = [p.detach().float().requires_grad_() for p in params]
    optimizer, twin = RAdam(params, **SETTINGS), RAdam(floats, **SETTINGS)
    for step in range(20):
        for p, q, g in zip(params, floats, gradients(params, step)):
            p.grad, q.grad = g.to(dtype), g.to(dtype).float()
        optimizer.step()
        twin.step()
    for p, q in zip(params, floats):
        assert p.dtype == dtype
        for name in ("exp_avg", "exp_avg_sq"):
            state = optimizer.state[p][name]
            assert state.dtype == torch.float32 and torch.equal(state, twin.state[q][name])
        # The parameter is rounded to half in every one of 20 steps: half a unit in the last place of 2 each time.
        assert torch.allclose(p.float(), q, atol=20 * torch.finfo(dtype).eps)
        assert not torch.equal(p.float(), q) or q.numel() == 1


def test_a_parameter_without_gradient_counts_its_own_steps():
    params = parameters(torch.float32)
    twins = plain(params, SETTINGS)
    optimizer = RAdam(params, **SETTINGS)
    for step in range(60):
        for i, (p, g) in enumerate(zip(params, gradients(params, step))):
            present = i == 0 or (i == 1 and step % 3 == 0) or (i == 2 and step >= 10)
            p.grad = g.to(p.dtype) if present else None
            if present:
                twins[i].step(p.grad)
        optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in params[:3]] == [60, 20, 50]
    assert params[3] not in optimizer.state
    for p, twin in zip(params, twins):
        assert torch.allclose(p.double(), twin.value, rtol=1e-5, atol=1e-5)


def options(**given):
    return RAdamConfig(**{"lr": [1e-3], **given})


def half_config(scale=1):
    """fairseq's, for its wrappers in half precision."""
    common = {"min_loss_scale": 1e-4, "threshold_loss_scale": None, "fp16_scale_window": 1000, "bf16": False}
    settings = {
        "optimizer": {
            "_name": "radam",
            "lr": [1e-2],
            "weight_decay": 0.1,
            "adam_betas": "(0.9, 0.98)",
            "adam_eps": 1e-8,
        },
        "common": {**common, "fp16_init_scale": scale, "fp16_scale_tolerance": 0.0, "fp16_no_flatten_grads": True},
        "distributed_training": {"distributed_world_size": 1},
        "optimization": {"update_freq": [1]},
    }
    return OmegaConf.create(settings)


def memory_efficient(params, **_):
    """fairseq's --memory-efficient-fp16 around our optimizer, its loss scale 1."""
    handle = FairseqRAdam(options(lr=[1e-2], weight_decay=0.1), params)
    return MemoryEfficientFP16Optimizer(half_config(), params, handle)


def train_half(wrapper, steps, frozen=()):
    """As fairseq's trainer; in step 3 one parameter has no gradient, in step 5 one overflows."""
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
    """Is it as with fairseq's own wrapper, bit for bit, through gradients that lack or overflow, and a resumption?"""
    found = []
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
        zeros = [p.grad for p in wrapper.fp32_params]
        assert all(p.grad is None for p in params) and not any(zero.any() for zero in zeros)
        found.append([*params, *wrapper.fp32_params, *moments])
    assert all(map(torch.equal, *found))
    assert kind.__name__ == fp16_optimizer.FP16Optimizer.__name__  # which fairseq compares when it resumes


def test_fp16_that_is_not_flat_has_few_operations(monkeypatch):
    """Is a fast model's wrapper ours, and does no part of an update go through the parameters?"""
    monkeypatch.setattr(optim, "FP16Optimizer", fp16_optimizer.FP16Optimizer)
    reference.build("transformer_admin", dropout=0.0, encoder_layers=1, decoder_layers=1, admin_fast="off")
    assert optim.FP16Optimizer is fp16_optimizer.FP16Optimizer
    reference.build("transformer_admin", dropout=0.0, encoder_layers=1, decoder_layers=1, admin_fast="on")
    params = [torch.ones(4, dtype=torch.float16).requires_grad_() for _ in range(50)]
    wrapper = optim.FP16Optimizer.build_optimizer(half_config(), params)
    wrapper.optimizer.fused = True  # torch's own is for each parameter
    wrapper.backward(sum(p.sum() for p in params))
    for _ in range(2):  # in the first update the state is made
        with Operations() as operations:
            wrapper._needs_sync = True
            wrapper.clip_grad_norm(1.0)
            wrapper.step()
    assert operations.number < 20


OTHER = {"lr": 9.0, "betas": (0.5, 0.5), "eps": 1.0, "weight_decay": 9.0}
"""The settings of the optimizer that is resumed: the state dict's count."""


@pytest.mark.parametrize(
    ("make", "dtype"),
    [(RAdam, torch.float32), (RAdam, torch.float16), (memory_efficient, torch.float16)],
)
@pytest.mark.parametrize("split", [3, 20])
def test_state_dict_continues_bit_for_bit(split, make, dtype):
    whole, params = parameters(dtype), parameters(dtype)
    train(whole, make(whole, **SETTINGS), range(40))
    optimizer = make(params, **SETTINGS)
    train(params, optimizer, range(split))
    resumed = [p.detach().clone().requires_grad_() for p in params]
    state, optimizer = copy.deepcopy(optimizer.state_dict()), make(resumed, **OTHER)
    optimizer.load_state_dict(state)
    train(resumed, optimizer, range(split, 40))
    for p, q in zip(whole, resumed):
        assert p.dtype == dtype and torch.equal(p, q)


def test_memory_efficient_fp16_divides_by_the_loss_scale_in_float32():
    """Do gradients count that float16 holds as they come, and not without the loss scale and a batch's tokens?"""
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
        # The rest is one rounding of what came.
        moment = optimizer.wrapped_optimizer.optimizer.state[p]["exp_avg"]
        assert moment.tolist() == pytest.approx([0.1 * gradient] * 5, rel=2**-11)


def test_a_scale_is_taken_out_of_flat_gradients_too():
    """Is fp16, whose gradients are float32 by then, as float32 is?"""
    found = []
    for scale in (1.0, torch.tensor(3.0)):
        params = parameters(torch.float32)
        optimizer = handled(FairseqRAdam, params)
        for step in range(10):
            for p, g in zip(params, gradients(params, step)):
                p.grad = g.to(p.dtype) * scale
            optimizer.step(scale=scale)
        moments = [optimizer.optimizer.state[p]["exp_avg"] for p in params]
        found.append(torch.cat([it.detach().flatten() for it in (*params, *moments)]))
    assert torch.allclose(*found, rtol=1e-6, atol=1e-5)


class Memory(TorchDispatchMode):
    """The most bytes that tensors made inside it have held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in torch.utils._pytree.tree_leaves(args) if torch.is_tensor(t)}
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if torch.is_tensor(t) and t.untyped_storage()._cdata not in given:
                storage = t.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.storages = {key: found for key, found in self.storages.items() if not found[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.storages.values()))
        return out


@pytest.mark.parametrize("chunk", [1, 24, 1000])
def test_parameters_are_cast_a_chunk_at_a_time(chunk, monkeypatch):
    """Does memory-efficient float16 compute the same, bit for bit, in the memory that one chunk needs?"""
    generator = torch.Generator().manual_seed(1)
    # A layer skipped twice is at another step than its neighbours: its chunk holds tractable and intractable ones.
    whole = [torch.randn(n, generator=generator).half().requires_grad_() for n in [8, 30] + [8] * 22]
    params = [p.detach().clone().requires_grad_() for p in whole]
    optimizers = RAdam(whole, **SETTINGS), RAdam(params, **SETTINGS)
    peaks = []
    for step in range(10):
        for p, q in zip(whole, params):
            skipped = step in (1, 4) and p is whole[3]
            p.grad = None if skipped else torch.randn(p.shape, generator=generator).half()
            q.grad = None if skipped else p.grad.clone()
        optimizers[0].step()
        with monkeypatch.context() as patch, Memory() as memory:
            patch.setattr(radam, "CHUNK", chunk)
            optimizers[1].step()
        peaks.append(memory.peak)
    for p, q in zip(whole, params):
        assert torch.equal(p, q)
        assert all(torch.equal(optimizers[0].state[p][key], optimizers[1].state[q][key]) for key in ("step", "exp_avg"))
    # A chunk's casts, which are kept, and copies, or those of a parameter that is larger; torch's own terms, which on a
    # CPU take one parameter at a time, of 30 elements at most; and a count for each chunk. At the first step the state
    # too: two moments.
    elements = min(max(chunk, 30), 214)
    elements += chunk if chunk < 30 else 0
    assert max(peaks[1:]) <= 12 * elements + 16 * 30 + 4 * 24
    assert peaks[0] <= 12 * elements + 16 * 30 + 8 * 214 + 4 * 24
    # Where all fit they are made again only as others have gradients: in the steps with a layer skipped and after them.
    assert chunk < 214 or max(peaks[3], *peaks[6:]) <= max(peaks[i] for i in (1, 2, 4, 5)) - 8 * 206


both = pytest.mark.parametrize("handle", [FairseqRAdam, AdamByGroup])
"""The optimizers that have groups of their own rate, and so are ours."""


def handled(handle, params):
    config = {FairseqRAdam: RAdamConfig, AdamByGroup: FairseqAdamConfig}[handle]
    return handle(config(adam_betas="(0.9, 0.98)", lr=[1e-2], weight_decay=0.1), params)


def amp(handle, params, scale=4096.0):
    """fairseq's --amp around an optimizer, with a scaler that works on the CPU (fairseq's turns itself off there)."""
    cfg = {"optimizer": {}, "common": {"fp16_init_scale": scale, "min_loss_scale": 1e-4, "amp_scale_window": None}}
    optimizer = AMPOptimizer(OmegaConf.create(cfg), params, handled(handle, params))
    optimizer._grad_scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return optimizer


def train_amp(params, optimizer, steps, clip_norm=0.0, overflow=()):
    """Gradients through the scaler; in the steps that overflow, an infinity in one of them."""
    for step in steps:
        optimizer.zero_grad()
        loss = sum((p * g.to(p.dtype)).sum() for p, g in zip(params, gradients(params, step)))
        optimizer.backward(loss * float("inf") if step in overflow else loss)
        optimizer.clip_grad_norm(clip_norm)
        optimizer.step()


def assert_same_training(params, optimizer, others, other):
    for p, q in zip(params, others):
        assert torch.equal(p, q)
        assert int(optimizer.state[p]["step"]) == int(other.state[q]["step"]) > 0
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[p][key], other.state[q][key]), key


@both
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_amp_unscales_once(clip_norm, handle):
    """Are gradients, moments and parameters those of float32, bit for bit? (A scale of 2^12 only moves exponents.)"""
    params, others = parameters(torch.float32), parameters(torch.float32)
    optimizer, other = amp(handle, params), handled(handle, others)
    for step in range(20):
        train_amp(params, optimizer, [step], clip_norm)
        for p, g in zip(others, gradients(others, step)):
            p.grad = g.to(p.dtype)
        other.clip_grad_norm(clip_norm)
        other.step()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(params, others))
    assert_same_training(params, optimizer.optimizer, others, other.optimizer)


@both
def test_amp_skips_an_overflow(handle):
    """Does a step with an infinite gradient change nothing but the loss scale, and the next one go on?"""
    params, others = parameters(torch.float32), parameters(torch.float32)
    optimizer, other = amp(handle, params), amp(handle, others)
    train_amp(params, optimizer, range(8), 0.0)
    train_amp(others, other, range(8), 0.0)
    train_amp(params, optimizer, [8], 0.0, overflow=[8])
    assert_same_training(params, optimizer.optimizer, others, other.optimizer)
    assert (optimizer.scaler.get_scale(), other.scaler.get_scale()) == (2048.0, 4096.0)
    train_amp(params, optimizer, range(9, 12), 0.0)
    train_amp(others, other, range(9, 12), 0.0)
    assert_same_training(params, optimizer.optimizer, others, other.optimizer)


@both
@pytest.mark.parametrize("make", [handled, amp])
def test_a_resumed_run_has_its_own_shares(make, handle):
    """Moments and rate are the checkpoint's, shares the run's, other groups refused? (--amp loads past the handle.)"""
    made = []
    for factor in (0.008, 0.5, None):
        slow, fast = parameters(torch.float32)[:2]
        if factor:
            slow_down([slow], "pretrained", factor)
        made.append(make(handle, [slow, fast]))
        made[-1].set_lr(4e-4)
        (train_amp if make is amp else train)([slow, fast], made[-1], range(3))
    saved, resumed, whole = made
    resumed.set_lr(1.0)
    resumed.load_state_dict(saved.state_dict())
    resumed.set_lr(resumed.get_lr())
    assert [group["lr"] for group in resumed.param_groups] == pytest.approx([4e-4, 2e-4])
    moments = [[it["exp_avg"] for it in wrapped.optimizer.state.values()] for wrapped in (saved, resumed)]
    assert len(moments[1]) == 2 and all(map(torch.equal, *moments))
    for ours, theirs in ((whole, saved), (saved, whole)):
        with pytest.raises(AdminError, match="--pretrained-lr-factor.* Give --reset-optimizer"):
            ours.load_state_dict(theirs.state_dict())


def test_loaded_state_is_where_the_parameters_are_under_memory_efficient_fp16():
    """Is a checkpoint's state, read to the CPU, moved to the device? (the meta device stands in for a GPU.)"""
    params = parameters(torch.float16)
    optimizer = memory_efficient(params)
    for p, g in zip(params, gradients(params, 0)):
        p.grad = g.to(p.dtype)
    optimizer.step()
    elsewhere = [torch.empty_like(p, device="meta").requires_grad_() for p in params]
    resumed = memory_efficient(elsewhere)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p in elsewhere:
        for name in ("exp_avg", "exp_avg_sq"):
            moment = resumed.optimizer.state[p][name]
            assert moment.device.type == "meta" and moment.dtype == torch.float32


@pytest.mark.parametrize("sizes", [[(3,)], [(3,), (5,)], [(3,), (4,), (5,)]])
def test_state_of_other_parameters(sizes):
    """A different number of them or, where fairseq has flattened them, a different size."""
    own, others = ([torch.ones(size, requires_grad=True) for size in given] for given in ([(3,), (4,)], sizes))
    optimizer = RAdam(others, **SETTINGS)
    sum(p.sum() for p in others).backward()
    optimizer.step()
    here = "of other shapes than this run's" if len(sizes) == 2 else ", and this run's of 2 "
    with pytest.raises(AdminError, match=f"is of {len(sizes)} tensors *{here}.* Give --reset-optimizer"):
        RAdam(own, **SETTINGS).load_state_dict(optimizer.state_dict())


def test_loads_no_compiler():
    """torch's own optimizers load torch.compile's in every process: 65 MB."""
    source = f"""
import sys, torch
from fairseq_admin.radam import RAdam
RAdam.fused = {RAdam.fused}
weight = torch.nn.Parameter(torch.ones(2))
rule = RAdam([weight], lr=1.0, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0)
weight.sum().backward()
rule.step()
rule.zero_grad()
rule.load_state_dict(rule.state_dict())
sys.exit("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("betas", ["(0.8, 0.99)", "0.8, 0.99", (0.8, 0.99), ["0.8", "0.99"]])
def test_options_are_the_optimizers(betas):
    handle = FairseqRAdam(options(adam_betas=betas, adam_eps=1e-6, weight_decay=0.2), parameters(torch.float32))
    (group,) = handle.optimizer.param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (1e-3, (0.8, 0.99), 1e-6, 0.2)
    assert OPTIMIZER_REGISTRY["radam"] is FairseqRAdam and handle.supports_flat_params
    handle.set_lr(5e-4)
    assert handle.get_lr() == 5e-4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(
            ({"adam_betas": betas}, r"--adam-betas is .*; two numbers were expected, e\.g\. '\(0\.9, 0\.98\)'")
            for betas in ("0.9", "(0.9, 0.98, 0.1)", "beta", "('a', 'b')", None)
        ),
        *(({"adam_betas": it}, "each beta must be at least 0 and below 1") for it in ("(0.9, 1.0)", "(-0.1, 0.98)")),
        *(({"adam_eps": it}, f"--adam-eps is {it}; a number of at least 0 was expected") for it in (-1.0, math.nan)),
        ({"weight_decay": math.inf}, "--weight-decay is inf; a number of at least 0 was expected"),
    ],
)
def test_wrong_options_are_refused(given, message):
    with pytest.raises(AdminError, match=message):
        FairseqRAdam(options(**given), parameters(torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fused_and_plain_take_over_from_each_other(dtype):
    """Both store the same, and changing from one to the other after any step makes no difference but rounding."""
    found = []
    for ways in ((True, False), (False, True), (True, True)):
        params = parameters(dtype)
        optimizer = RAdam(params, **SETTINGS)
        optimizer.fused = ways[0]
        train(params, optimizer, range(4))  # before the first step that moves
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = RAdam(params, **SETTINGS)
        optimizer.load_state_dict(saved)
        optimizer.fused = ways[1]
        train(params, optimizer, range(4, 40))
        found.append((params, optimizer.state_dict()))
    for params, state in found[1:]:
        assert state["state"][0].keys() == found[0][1]["state"][0].keys()
        for p, q in zip(params, found[0][0]):
            # 36 updates of at most 1e-2, each rounded to the parameter's type.
            torch.testing.assert_close(p, q, rtol=1e-5 if dtype == torch.float32 else 36 * 2**-11, atol=1e-6)
        for i, entries in state["state"].items():
            torch.testing.assert_close(entries, found[0][1]["state"][i], rtol=1e-5, atol=1e-7)


def test_no_step_of_nothing_by_nothing():
    """Without eps, a weight that has no gradient stays what it is before the first step, too."""
    p = torch.ones(3).requires_grad_()
    p.grad = torch.tensor([0.0, 1.0, 0.0])
    RAdam([p], **{**SETTINGS, "eps": 0.0, "weight_decay": 0.0}).step()
    assert torch.equal(p, torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("limit", [0.0, 1.0, 1e6])
def test_clips_as_fairseq(limit: float, dtype: torch.dtype) -> None:
    """The norm and what becomes of the gradients, to rounding; half numbers are summed in float32, as fairseq does."""
    found = []
    for clip in (FairseqRAdam.clip_grad_norm, FairseqOptimizer.clip_grad_norm):
        torch.manual_seed(1)
        handle = FairseqRAdam(options(), [torch.zeros(size, dtype=dtype) for size in (300, 7, 40)])
        for i, p in enumerate(handle.params):
            p.grad = None if i == 1 else 60 * torch.randn_like(p)
        norm = clip(handle, limit)
        assert norm.dtype == torch.float32 and norm > 500
        found.append([norm, *(p.grad for p in handle.params if p.grad is not None)])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=1e-6 if dtype == torch.float32 else 0, atol=0)


def test_clips_with_one_operation_for_all_norms() -> None:
    class Names(TorchDispatchMode):
        found: list[str] = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.found.append(function.__name__.split(".")[0])
            return function(*args, **(kwargs or {}))

    handle = FairseqRAdam(options(), [torch.zeros(4) for _ in range(50)])
    for p in handle.params:
        p.grad = torch.ones_like(p)
    with Names() as names:
        handle.clip_grad_norm(1.0)
    assert names.found.count("_foreach_norm") == 1 and len(names.found) < 10
