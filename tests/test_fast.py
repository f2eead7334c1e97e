"""The fast layers: do they compute what the plain ones do, drop by the right law, and give way where they must?"""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fairseq.utils
import language
import masked
import pytest
import torch
from conftest import ROOT
from reference import PAD, batch, build
from test_schemes import MECHANISMS
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_admin.fast import attention, linear
from fairseq_admin.fast.attention import FastAttention, by_products, causal_bias, padding_bias
from fairseq_admin.fast.dropout import FastDropout
from fairseq_admin.fast.linear import FastLinear
from fairseq_admin.fast.plain import plain_layers
from fairseq_admin.method.schemes import SCHEMES
from recipes.bench.host import faked_device

STILL = {"dropout": 0.0, "attention_dropout": 0.0}
DROPPED = {"dropout": 0.2, "attention_dropout": 0.2, "activation_dropout": 0.2}


def translation(padded: bool = True, **options: Any) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """A translation model, and from it to the sum of its loss on a batch; sources are shorter than a vector is."""
    src, lengths, prev = batch(padded=padded, target=attention.ROW + 2)
    target = prev.roll(-1, 1).masked_fill(prev.eq(PAD), PAD)
    return build("transformer_admin_tiny", **options), lambda model: loss(model(src, lengths, prev)[0], target)


def language_model(padded: bool = True, **options: Any) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    words = language.batch(padded=padded)
    target = words.roll(-1, 1).masked_fill(words.eq(PAD), PAD)
    return language.build(**options), lambda model: loss(model(words)[0], target)


def masked_model(padded: bool = True, **options: Any) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    words = masked.batch(padded=padded)
    return masked.build(**options), lambda model: loss(model(words)[0], words)


KINDS = {"translation": translation, "language model": language_model, "masked language model": masked_model}


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum")


def differences(fast: nn.Module, plain: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> dict[str, float]:
    """Of the loss and of every gradient, relative to the plain one.

    Gradients that are 0 but for rounding, as every key's bias has, are relative to the largest instead.
    """
    losses = []
    for model in (fast, plain):
        torch.manual_seed(3)  # layerdrop draws
        losses.append(loss_of(model))
        losses[-1].backward()
    largest = max(p.grad.norm() for p in plain.parameters() if p.grad is not None)
    result = {"loss": abs(losses[0] - losses[1]).item() / losses[1].item()}
    for (name, p), q in zip(fast.named_parameters(), plain.parameters()):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            result[name] = ((p.grad - q.grad).norm() / max(q.grad.norm(), 1e-3 * largest)).item()
    return result


def pair(kind: str, dtype: torch.dtype = torch.float32, **options: Any):
    """The same model, fast and plain, and what gives its loss."""
    fast, loss_of = KINDS[kind](admin_fast="on", **options)
    plain, _ = KINDS[kind](admin_fast="off", **options)
    plain.load_state_dict(fast.state_dict())
    return fast.to(dtype), plain.to(dtype), loss_of


@pytest.fixture
def exact_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """fairseq's own attention computes softmax in float32, whatever the model is in."""
    monkeypatch.setattr(fairseq.utils, "softmax", lambda x, dim, onnx_trace=False: x.softmax(dim))


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU on which oneDNN is ahead, whatever this one is, also for the tiny models here."""
    monkeypatch.setattr("fairseq_admin.fast.model.ahead", lambda: 2.0)
    monkeypatch.setattr("fairseq_admin.fast.linear.SMALLEST", 0)


@pytest.fixture(params=["cpu", "gpu"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The branches that a CPU takes, and those that a GPU takes, computed here."""
    if request.param == "cpu":
        yield "cpu"
    else:
        with faked_device():
            yield "gpu"


CASES = [
    *((kind, scheme, True) for kind in KINDS for scheme in MECHANISMS),
    *(("translation", scheme, True) for scheme in SCHEMES if scheme not in MECHANISMS),
    *((kind, "admin", False) for kind in KINDS),
]


@pytest.mark.parametrize(("kind", "scheme", "padded"), CASES)
def test_gradients_are_the_plain_ones(kind: str, scheme: str, padded: bool, device: str, exact_softmax) -> None:
    """In float64, of every parameter, of every mechanism in every kind of model, and of every scheme."""
    # fairseq's gelu computes in float32, whatever the model is in.
    options = {"admin_scheme": scheme, "activation_fn": "relu", **STILL}
    fast, plain, loss_of = pair(kind, torch.float64, padded=padded, **options)
    assert any(isinstance(module, FastAttention) for module in fast.modules())
    found = differences(fast, plain, loss_of)
    assert max(found.values()) <= 1e-9, found


@pytest.mark.parametrize("activation", ["relu", "gelu_accurate"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_with_dropout(kind: str, activation: str, device: str) -> None:
    """Against the change of the loss in one direction of all weights, with the same elements dropped."""
    model, loss_of = KINDS[kind](admin_fast="on", activation_fn=activation, **DROPPED)
    model.double()
    loss_of(model)  # the first batch profiles

    def after(step: float) -> Tensor:
        with torch.no_grad():
            for p, way in zip(weights, ways):
                p += step * way
        torch.manual_seed(7)
        return loss_of(model)

    weights = list(model.parameters())
    ways = [torch.randn(p.shape, generator=torch.Generator().manual_seed(1), dtype=p.dtype) * 1e-3 for p in weights]
    gradients = torch.autograd.grad(after(0.0), weights)
    slope = sum((gradient * way).sum() for gradient, way in zip(gradients, ways)).item()
    high, low = after(1e-5).item(), after(-2e-5).item()
    change = (high - low) / 2e-5
    assert abs(slope) > 1e-3 and slope == pytest.approx(change, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_through_onednn(kind: str, onednn) -> None:
    """A sum of a few hundred products has a relative error of about 1e-6."""
    fast, plain, loss_of = pair(kind, **STILL)
    layers = [module for module in fast.modules() if isinstance(module, FastLinear)]
    assert len(layers) > 10
    found = differences(fast, plain, loss_of)
    assert max(found.values()) <= 1e-5, found


@pytest.mark.parametrize("length", [7, attention.ROW, attention.ROW + 5])
@pytest.mark.parametrize("mask", ["causal", "padding"])
def test_products_are_the_formula(mask: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same elements dropped, gradients too; scores have a vector's columns where there are fewer keys."""
    torch.manual_seed(1)
    hidden = torch.zeros(3, length, dtype=torch.bool)
    hidden[1, 5:] = hidden[2, :2] = True
    q, k, v = (torch.randn(3, 4, length, 5, dtype=torch.float64, requires_grad=True) for _ in range(3))
    width = max(length, attention.ROW)
    kept = torch.rand(12, length, width).ge(0.3)
    monkeypatch.setattr(attention, "dropout", lambda x, p: x * kept / (1 - p))
    if mask == "causal":
        bias = causal_bias(length, q)
        covered = torch.ones(length, length, dtype=torch.bool).triu(1)
    else:
        bias, covered = padding_bias(hidden, q), hidden[:, None, None]
    assert bias.size(-1) == width
    scores = (q @ k.transpose(2, 3) / math.sqrt(5)).masked_fill(covered, -math.inf)
    expected = scores.softmax(-1) * kept[..., :length].unflatten(0, (3, 4)) / 0.7 @ v
    found = by_products(q, k, v, bias, 0.3)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad((out * weights).sum(), (q, k, v)) for out in (found, expected))):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_gpus_bias_is_aligned() -> None:
    """Else torch copies it in every layer, to rows of a multiple of eight numbers."""
    with faked_device():
        bias = padding_bias(torch.tensor([[True, False, False]] * 2), torch.ones(1, dtype=torch.bfloat16))
    assert bias.dtype == torch.bfloat16 and bias.shape == (2, 1, 1, 3)
    assert bias.stride(0) % 8 == 0 and bias[0, 0, 0].tolist() == [-math.inf, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_is_plain(kind: str) -> None:
    """To the last bit: validation, generation, features, and within the profiling pass."""
    fast, plain, loss_of = pair(kind, **DROPPED)
    with torch.no_grad():
        assert torch.equal(loss_of(fast.eval()), loss_of(plain.eval()))
    losses = []
    for model in (fast.train(), plain.train()):
        torch.manual_seed(3)
        with plain_layers(model):
            losses.append(loss_of(model))
    assert torch.equal(*losses) and not any(getattr(module, "plain", False) for module in fast.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_profiles_the_same_omega(kind: str, onednn) -> None:
    """To the last bit, with dropout."""
    states = []
    for fast in ("on", "off"):
        model, loss_of = KINDS[kind](admin_fast=fast, **DROPPED)
        torch.manual_seed(3)
        loss_of(model)
        states.append({key: value for key, value in model.state_dict().items() if "omega" in key})
    assert len(states[0]) > 4 and all(torch.equal(states[0][key], states[1][key]) for key in states[1])


@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_move_both_ways(kind: str) -> None:
    """And initial weights are the same."""
    fast, plain = (KINDS[kind](admin_fast=fast)[0].state_dict() for fast in ("on", "off"))
    assert list(fast) == list(plain) and all(torch.equal(fast[key], plain[key]) for key in plain)


def left_padded(model: nn.Module) -> Tensor:
    src, lengths, prev = batch()
    return loss(model(src, lengths, prev.flip(1))[0], prev.flip(1))


def aligned(model: nn.Module) -> Tensor:
    src, lengths, prev = batch()
    logits, extra = model(src, lengths, prev, alignment_layer=0)
    assert extra["attn"][0].shape == (8, 9, 11)
    return loss(logits, prev)


def all_states(model: nn.Module) -> Tensor:
    src, lengths, prev = batch()
    encoded = model.encoder(src, lengths, return_all_hiddens=True)
    assert len(encoded["encoder_states"]) == 1 + len(model.encoder.layers)
    return loss(model.decoder(prev, encoder_out=encoded)[0], prev)


@pytest.mark.parametrize("loss_of", [left_padded, aligned, all_states])
def test_plain_layers_compute(loss_of: Callable[[nn.Module], Tensor], device: str, exact_softmax) -> None:
    """Where padding comes first, which causality does not hide, and where weights or a layer's output are wanted."""
    fast, plain, _ = pair("translation", torch.float64, admin_init="log", activation_fn="relu", **STILL)
    found = differences(fast, plain, loss_of)
    assert max(found.values()) <= 1e-9, found


@pytest.mark.parametrize(
    "options", [{"encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5}, {"no_cross_attention": True}]
)
def test_layers_that_are_not_there(options: dict[str, Any], device: str, exact_softmax) -> None:
    """Is there a gradient of just the parameters that plain layers have one of?"""
    given = {"encoder_layers": 4, "decoder_layers": 4, "admin_init": "log", "activation_fn": "relu", **STILL}
    fast, plain, loss_of = pair("translation", torch.float64, **given, **options)
    found = differences(fast, plain, loss_of)
    assert max(found.values()) <= 1e-9, found
    if "encoder_layerdrop" in options:
        assert len(found) < 1 + len(list(fast.parameters()))


@pytest.mark.parametrize("amp", [False, True])
def test_checkpointed_activations_recompute_the_same(amp: bool, device: str) -> None:
    """Gradients with dropout are those without checkpointing; sums of gradients come in another order."""
    gradients = []
    for checkpointed in (True, False):
        options = {"activation_dropout": 0.1, "admin_init": "log", "admin_fast": "on"}
        model, loss_of = translation(checkpoint_activations=checkpointed, **options)
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
            value = loss_of(model)
        value.backward()
        gradients.append([p.grad for name, p in model.named_parameters() if "k_proj.bias" not in name])
    assert all((a - b).abs().max() <= (0.02 if amp else 1e-5) * b.abs().max() for a, b in zip(*gradients))


@pytest.mark.parametrize(("autocast", "bound"), [(True, 0.05), (False, 0.1)])
def test_bfloat16(autocast: bool, bound: float, device: str, onednn) -> None:
    """Of eight bits: a product's error is some 0.4 %, and there are a dozen in a row; in all the weights it is more."""
    dtype = torch.float32 if autocast else torch.bfloat16
    fast, plain, loss_of = pair("translation", dtype, admin_init="log", **STILL)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found = differences(fast, plain, loss_of)
    # The gradient of a key's bias is 0 but for rounding.
    assert max(value for name, value in found.items() if "k_proj.bias" not in name) < bound, found


class Operations(TorchDispatchMode):
    """Counts what is called, by name, and questions whether something is so."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.waits = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[function.__name__.split(".")[0]] += 1
        self.waits += function is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool
        return function(*args, **(kwargs or {}))


def test_a_gpu_is_asked_little() -> None:
    """One product for an input's projections, also for all layers' keys and values; one wait.

    The wait is for whether the target begins with padding; fairseq waits in every encoder layer.
    """
    sizes = {"encoder_layers": 5, "decoder_layers": 4, "admin_init": "log", **STILL}
    model, loss_of = translation(admin_fast="on", **sizes)
    with faked_device(), Operations() as operations:
        loss_of(model)
    # Twos in the integers of fairseq's positions, which are on the CPU always.
    assert operations.waits == 1 + 2
    calls = operations.calls
    attended = sum(number for name, number in calls.items() if "scaled_dot_product" in name)
    assert attended == 5 + 2 * 4 and not calls["bmm"] and not calls["baddbmm"]
    # Of the encoder's layers four products, of the decoder's six, keys and values of all, and the logits.
    assert calls["addmm"] + calls["mm"] == 5 * 4 + 4 * 6 + 1 + 1


@pytest.mark.parametrize("p", [0.1, 0.3])
def test_dropout_law(p: float) -> None:
    """Elements are dropped with chance p, each on its own, the rest is scaled by 1 / (1 - p), and gradients likewise.

    Frequencies of n independent draws have a standard error of sqrt(p (1 - p) / n); five of them are allowed. The
    chance is a multiple of 2^-16, so the scale is right to 2^-16, relative.
    """
    torch.manual_seed(1)
    x = torch.rand(1000, 1001) + 0.5
    module, leaf = FastDropout(p).train(), x.clone().requires_grad_()
    y = module(leaf)
    y.sum().backward()
    dropped = y.eq(0)

    def frequency(of: Tensor, expected: float) -> None:
        assert abs(of.double().mean() - expected) < 5 * math.sqrt(expected * (1 - expected) / of.numel())

    frequency(dropped, p)
    for shift in ((0, 1), (1, 0), (0, 4), (0, 2)):
        frequency(dropped & dropped.roll(shift, (0, 1)), p * p)
    frequency(dropped & module(x).eq(0), p * p)
    kept = (~dropped).float() / (1 - p)
    torch.testing.assert_close(y, x * kept, rtol=2**-14, atol=0)
    torch.testing.assert_close(leaf.grad, kept, rtol=2**-14, atol=1e-6)
    assert torch.equal(module.eval()(x), x)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quant_noise_pq": 0.1}, "stock layers, for --quant-noise-pq has no faster ones"),
        ({"cross_self_attention": True}, "stock layers, for --cross-self-attention has no"),
        ({}, None),
    ],
    ids=["quantisation noise", "cross-self-attention", "all fast"],
)
def test_says_what_stays_stock(options: dict, said: str | None, caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    """Once, with the option's name."""
    monkeypatch.setattr("fairseq_admin.fast.model.ahead", lambda: 1.0)
    with caplog.at_level(logging.INFO):
        build("transformer_admin_tiny", admin_fast="on", **options)
    lines = [record.getMessage() for record in caplog.records if "--admin-fast" in record.getMessage()]
    assert len(lines) == (said is not None) and all(said in line for line in lines)


@pytest.mark.parametrize("fast", ["on", "off"])
def test_cudnns_attention_is_off(fast: str, caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    """From the first model on, said once, and only where there is a GPU; importing the package changes nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    torch.backends.cuda.enable_cudnn_sdp(True)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            build("transformer_admin_tiny", admin_fast=fast)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert len([record for record in caplog.records if "cuDNN's attention is off" in record.getMessage()]) == 1


def test_small_layers_keep_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their sizes alone: a probe of something so small comes out now so, now so, and resumed runs would differ."""
    used = []
    monkeypatch.setattr(linear, "product", lambda x, *_: used.append(x) or nn.functional.linear(x, *_))
    for width in (63, 64):
        layer = nn.Linear(64, width)
        layer.__class__ = FastLinear
        layer(torch.ones(2, 64))
    assert len(used) == 1


def test_probes_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves as many as there were. Two threads' probe on a busy machine chose oneDNN where MKL is level."""
    used: list[int] = []
    monkeypatch.setattr(linear, "product", lambda *_: used.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        linear.ahead.__wrapped__()
        assert set(used) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# Products of many shapes, as batches are.
OF_MANY_SHAPES = """
import torch
from fairseq_admin.fast import linear

def resident():
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmRSS")).split()[1]) * 1024

torch.set_num_threads(1)
linear.ahead()
weight = torch.ones(256, 128)
with torch.no_grad():
    linear.product(torch.ones(400, 128), weight)
    before = resident()
    for tokens in range(700, 1000):
        linear.product(torch.ones(tokens, 128), weight)
print(resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch without oneDNN")
def test_onednn_keeps_few_products() -> None:
    """300 shapes leave 32 products, of at most 1 MB: without the bound 260 MB were kept."""
    environment = {name: value for name, value in os.environ.items() if name not in linear.CACHES}
    done = subprocess.run(
        [sys.executable, "-c", OF_MANY_SHAPES], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) / 1e6 < 110
