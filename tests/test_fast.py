"""The fast layers: do they match the plain layers, follow the law of dropout, and leave special cases to plain layers?

(test_modes.py trains with them in every mode, and resumes bit for bit.)"""

from __future__ import annotations

import contextlib
import logging
import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import fairseq.utils
import kinds
import language
import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY
from kinds import STILL, Kind
from reference import PAD, TINY, batch, build, dictionary
from test_schemes import MECHANISMS
from torch import Tensor, nn
from torch.nn import functional

from fairseq_admin.fast import attention
from fairseq_admin.fast import dropout as dropouts
from fairseq_admin.fast.attention import FastAttention
from fairseq_admin.fast.dropout import FastDropout
from fairseq_admin.fast.plain import Fast
from fairseq_admin.method.schemes import MODEL_SCHEMES
from recipes.research.bench.counting import Operations
from recipes.research.bench.speed import faked_device

DROPPED = {"dropout": 0.2, "attention_dropout": 0.3, "activation_dropout": 0.1}


def translation(padded: bool = True, **options: Any) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """A translation model, and a function from a model to its summed loss. Sources are shorter than a SIMD vector."""
    src, lengths, prev = batch(padded=padded, target=attention.ROW + 2)
    target = prev.roll(-1, 1).masked_fill(prev.eq(PAD), PAD)
    return build("transformer_admin_tiny", **options), lambda model: loss(model(src, lengths, prev)[0], target)


def of_words(kind: Kind, padded: bool = True, **options: Any) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """The same for a language model, masked or not."""
    (words,) = kind.batch(padded=padded).values()
    return kind.build(**options), lambda model: loss(model(words)[0], words)


KINDS = {"translation": translation} | {name: partial(of_words, kinds.KINDS[name]) for name in ("language", "masked")}


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum")


def differences(fast: nn.Module, plain: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> dict[str, float]:
    """Differences of the loss and of every gradient, relative to the plain model's.

    If a gradient is 0 up to rounding, as for every key's bias, its difference is relative to the largest gradient.
    """
    losses = []
    for model in (fast, plain):
        torch.manual_seed(3)  # for layerdrop's draws
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
    """The same model, fast and plain, and its loss function."""
    fast, loss_of = KINDS[kind](admin_fast="on", **options)
    plain, _ = KINDS[kind](admin_fast="off", **options)
    plain.load_state_dict(fast.state_dict())
    return fast.to(dtype), plain.to(dtype), loss_of


@pytest.fixture
def exact_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make fairseq's attention compute softmax in the model's type. It always uses float32."""
    monkeypatch.setattr(fairseq.utils, "softmax", lambda x, dim, onnx_trace=False: x.softmax(dim))


@pytest.fixture(params=[contextlib.nullcontext, faked_device], ids=["cpu", "gpu"])
def device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the code for CPUs and the code for GPUs, both on this CPU."""
    with request.param():
        yield


CASES = [
    *((kind, scheme, True) for kind in KINDS for scheme in MECHANISMS),
    *(("translation", scheme, True) for scheme in MODEL_SCHEMES if scheme not in MECHANISMS),
    *((kind, "admin", False) for kind in KINDS),
]


def every_fifth(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """A fixed dropout for both models: it drops channels 0, 5, 10, ..., and in attention positions 0, 5, 10, ..."""
    return x * torch.arange(x.size(-1)).remainder(5).ne(0) / (1 - p) if training and p else x


def attended(q: Tensor, k: Tensor, v: Tensor, bias=None, dropout_p: float = 0.0, is_causal: bool = False) -> Tensor:
    """torch's scaled_dot_product_attention, with `every_fifth`."""
    scores = q @ k.transpose(2, 3) / math.sqrt(q.size(-1)) + (0 if bias is None else bias)
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -math.inf)
    return every_fifth(scores.softmax(-1), dropout_p) @ v


@pytest.mark.parametrize(("kind", "scheme", "padded"), CASES)
def test_gradients_are_the_plain_ones(kind, scheme, padded, device, exact_softmax) -> None:
    """In float64 with dropout, do all gradients equal the plain layers'?

    The cases are all schemes, and all mechanisms in every kind of model.
    """
    # fairseq's gelu always computes in float32.
    options = {"admin_scheme": scheme, "activation_fn": "relu", **DROPPED}
    fast, plain, loss_of = pair(kind, torch.float64, padded=padded, **options)
    assert any(isinstance(module, FastAttention) for module in fast.modules())
    with pytest.MonkeyPatch.context() as patch:  # undone before the device fixture
        patch.setattr(dropouts, "_Dropout", SimpleNamespace(apply=every_fifth))
        patch.setattr(functional, "dropout", every_fifth)
        patch.setattr(functional, "scaled_dot_product_attention", attended)
        errors = differences(fast, plain, loss_of)
    assert max(errors.values()) <= 1e-9, errors


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_and_profiling_are_plain(kind: str) -> None:
    """Do initial weights, evaluation and ω equal those of plain layers, bit for bit?

    Evaluation is the code of validation and generation. ω are profiled with dropout.
    """
    states = []
    for fast in ("on", "off"):
        model, loss_of = KINDS[kind](admin_fast=fast, **DROPPED)
        with torch.no_grad():
            evaluated = loss_of(model.eval())
        torch.manual_seed(3)
        loss_of(model.train())
        assert not any(getattr(module, "plain", False) for module in model.modules())
        states.append({"loss": evaluated, **model.state_dict()})
    assert list(states[0]) == list(states[1]) and all(torch.equal(states[0][key], states[1][key]) for key in states[1])
    assert any((value > 1.01).any() for key, value in states[0].items() if "omega_init" in key)


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


SKIPPED = {"encoder_layers": 4, "decoder_layers": 4, "encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5}


@pytest.mark.parametrize(
    ("loss_of", "options"),
    [(left_padded, {}), (aligned, {}), (all_states, {}), (None, SKIPPED), (None, {"no_cross_attention": True})],
)
def test_what_plain_layers_are_for(loss_of: Any, options: dict[str, Any], device: None, exact_softmax: None) -> None:
    """Do gradients equal the plain layers' in the cases that are left to the plain layers?

    These cases are padding first (causality does not hide it), requests for weights or a layer's output, skipped
    layers, and layers without encoder-attention. The same parameters must have gradients.
    """
    fast, plain, whole = pair("translation", torch.float64, admin_init="log", activation_fn="relu", **STILL, **options)
    fast.decoder.left_pad_target = loss_of is left_padded  # as the task sets it
    errors = differences(fast, plain, loss_of or whole)
    assert max(errors.values()) <= 1e-9, errors
    assert not options or len(errors) < 1 + len(list(fast.parameters()))


def test_padding_before_the_target_is_said_or_seen(device: None) -> None:
    """A task must say that its targets begin with padding. If it does not, does a GPU stop the run?

    On a CPU, the layers see the padding by themselves.
    """
    options = {"encoder_layers": 1, "decoder_layers": 1, "admin_init": "log", "admin_fast": "on"}
    model = build("transformer_admin_tiny", **options)
    if model.decoder.gpu_code:
        with pytest.raises(RuntimeError, match="a target begins with padding: give --left-pad-target True"):
            left_padded(model)
    else:
        left_padded(model)
    for option, expected in (("True", True), (True, True), (False, False)):
        task = SimpleNamespace(source_dictionary=dictionary(9), target_dictionary=dictionary(9))
        task.args = SimpleNamespace(left_pad_target=option)
        args = Namespace(**TINY, admin_fast="on", max_source_positions=9, max_target_positions=9)
        ARCH_CONFIG_REGISTRY["transformer_admin_tiny"](args)
        assert type(model).build_model(args, task).decoder.left_pad_target is expected


@pytest.mark.parametrize("amp", [False, True])
def test_checkpointed_activations_recompute_the_same(amp: bool, device: None) -> None:
    """With dropout, do gradients equal those without checkpointing, up to the order of sums?"""
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
def test_bfloat16_gradients_are_close(autocast: bool, bound: float, device: None) -> None:
    """Are bfloat16 gradients close? A dozen products in a row are each off by 0.4 %; bfloat16 weights add to it."""
    dtype = torch.float32 if autocast else torch.bfloat16
    fast, plain, loss_of = pair("translation", dtype, admin_init="log", **STILL)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        errors = differences(fast, plain, loss_of)
    # The gradient of a key's bias is 0 up to rounding.
    assert max(value for name, value in errors.items() if "k_proj.bias" not in name) < bound, errors


def test_a_gpu_is_not_waited_for() -> None:
    """fairseq waits for the GPU in every encoder layer. Two waits are for integer positions, always on the CPU."""
    model, loss_of = translation(admin_fast="on", encoder_layers=5, decoder_layers=4, admin_init="log", **STILL)
    with faked_device(), Operations() as operations:
        loss_of(model)
    assert operations.waits == 2


@pytest.mark.parametrize("p", [0.1, 0.3])
def test_elements_are_dropped_independently_and_the_rest_is_scaled(p: float) -> None:
    """Are elements dropped independently with probability p? Are the others scaled?

    The other elements and their gradients are scaled by 1 / (1 - p).

    A frequency over n independent draws has a standard error of sqrt(p (1 - p) / n); five of these are allowed. The
    probability is a multiple of 2^-16, so the scale has a relative error of 2^-16.
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


@pytest.mark.parametrize("option", ["--quant-noise-pq", "--cross-self-attention", None])
def test_the_log_says_what_stays_stock(option: str | None, caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    """Does the log say once which layers stay stock, with the option's name?"""
    options = {option[2:].replace("-", "_"): 0.1} if option else {}
    with caplog.at_level(logging.INFO):
        model = build("transformer_admin_tiny", admin_fast="on", **options)
    lines = [record.getMessage() for record in caplog.records if "--admin-fast" in record.getMessage()]
    assert lines == ([f"Admin: --admin-fast: stock layers, for lack of faster ones with {option}"] if option else [])
    assert any(isinstance(module, Fast) for module in model.modules()) == (option is None)


def test_scaled_heads_train() -> None:
    """Do models with scaled heads train? fairseq's layers find their heads only in shape (T, B, C)."""
    model = language.build(admin_fast="on", scale_heads=True)
    model(language.batch())[0].sum().backward()


def test_cudnns_attention_is_off_with_fast_layers_alone(caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    """Does the first fast model turn cuDNN's attention off and log it once, only with a GPU? Plain models do not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    torch.backends.cuda.enable_cudnn_sdp(True)
    with caplog.at_level(logging.INFO):
        for fast in ("off", "on", "on"):
            build("transformer_admin_tiny", admin_fast=fast)
            assert torch.backends.cuda.cudnn_sdp_enabled() == (fast == "off")
    assert len([record for record in caplog.records if "cuDNN's attention is off" in record.getMessage()]) == 1
