"""The fast layers: do they compute what their twins do, drop by the right law, and give way where they must?"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fairseq.utils
import language
import masked
import pytest
import torch
from conftest import ROOT
from reference import PAD, batch, build
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_admin.fast import again, attention, linear, products
from fairseq_admin.fast import shortcut as shortcut_module
from fairseq_admin.fast.attention import Causal, FastAttention, Padding
from fairseq_admin.fast.dropout import FastDropout
from fairseq_admin.fast.feed_forward import FUSED, ActivationDropout
from fairseq_admin.fast.linear import FastLinear
from fairseq_admin.fast.pieces import Branch
from fairseq_admin.fast.shortcut import FastShortcutNorm, LeftToTheNorm, Shared
from fairseq_admin.fast.twin import Fast
from fairseq_admin.method.norms import ShortcutNorm
from fairseq_admin.method.schemes import SCHEMES

STILL = {"dropout": 0.0, "attention_dropout": 0.0}
EXACT = {**STILL, "activation_fn": "relu"}  # fairseq's gelu computes in float32, whatever the model is in


def translation(padded: bool = True, **options: Any) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """A translation model, and from it to the sum of its loss on a batch."""
    src, lengths, prev = batch(padded=padded)
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
    losses = [loss_of(model) for model in (fast, plain)]
    for each in losses:
        each.backward()
    largest = max(p.grad.norm() for p in plain.parameters() if p.grad is not None)
    result = {"loss": abs(losses[0] - losses[1]).item() / losses[1].item()}
    for (name, p), q in zip(fast.named_parameters(), plain.parameters()):
        if q.grad is None:
            assert p.grad is None, name
        else:
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
    monkeypatch.setattr("fairseq_admin.fast.model.SMALLEST", 0)


@pytest.fixture
def for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that say that they are on no CPU: the branches that a GPU takes, computed here."""
    monkeypatch.setattr(Tensor, "is_cpu", property(lambda self: False))


@pytest.mark.parametrize("worth", [0, 2**40], ids=["made again", "kept"])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("scheme", ["admin", "pre-ln"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_twins_for_a_gpu(
    kind: str, scheme: str, activation: str, worth: int, exact_softmax, for_a_gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(again, "WORTH", worth)
    fast, plain, loss_of = pair(kind, torch.float64, admin_scheme=scheme, **{**EXACT, "activation_fn": activation})
    found = differences(fast, plain, loss_of)
    assert max(found.values()) <= 1e-9, found


@pytest.mark.parametrize("activation", ["relu", "gelu_accurate"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_with_dropout_for_a_gpu(kind: str, activation: str, for_a_gpu) -> None:
    """Against the change of the loss in one direction of all weights, with the same elements dropped."""
    dropped = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.2)
    model, loss_of = KINDS[kind](admin_fast="on", activation_fn=activation, **dropped)
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


def test_dropout_after_relu_is_one_operation_for_a_gpu(for_a_gpu) -> None:
    """In place torch has no kernel for it: random numbers, a quotient, two products, and a factor rounded to a half."""
    called: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(func.name())
            return func(*args, **(kwargs or {}))

    x = torch.randn(64)
    with Names():
        FUSED[functional.relu](0.1).forward(x)
    assert called == ["aten::relu", "aten::native_dropout"]


def test_products_have_statistics_of_the_norms_shape() -> None:
    """A CPU does not look; torch's decomposition, which fake tensors and its compiler take, broadcasts them."""
    z, weight = torch.randn(8, 11, 32, device="meta"), torch.ones(32, device="meta")
    mean = torch.native_layer_norm(z, weight.shape, weight, weight, 1e-5)[1]
    assert Shared().products(z, z, mean, weight).shape == (32,)


@pytest.mark.parametrize("kind", KINDS)
def test_inference_mode(kind: str) -> None:
    """Do the fast layers work where tensors count no versions, in training mode too?"""
    fast, plain, loss_of = pair(kind, **EXACT)
    loss_of(fast), loss_of(plain)  # profiled
    for training in (True, False):
        with torch.inference_mode():
            found, expected = (loss_of(model.train(training)).item() for model in (fast, plain))
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "full"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_twins(kind: str, scheme: str, padded: bool, exact_softmax) -> None:
    """In float64, of every parameter, in every scheme."""
    if kind == "masked language model" and scheme.startswith("t-fixup"):
        pytest.skip("refused: its paper has no gain for an encoder alone")
    fast, plain, loss_of = pair(kind, torch.float64, padded=padded, admin_scheme=scheme, **EXACT)
    assert any(isinstance(module, FastAttention) for module in fast.modules())
    found = differences(fast, plain, loss_of)
    assert max(found.values()) <= 1e-9, found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_accurate", "tanh"])
def test_gradients_in_float32(kind: str, activation: str, onednn) -> None:
    """With every linear layer through oneDNN. A sum of a few hundred products has a relative error of about 1e-6."""
    fast, plain, loss_of = pair(kind, activation_fn=activation, **STILL)
    assert any(isinstance(module, FastLinear) and module.onednn for module in fast.modules())
    found = differences(fast, plain, loss_of)
    assert max(found.values()) <= 1e-5, found


def test_padded_positions_are_the_twins(exact_softmax) -> None:
    """No loss is there, but whoever reads an encoder's features sees them."""
    fast, plain, _ = pair("translation", torch.float64, admin_init="log", **STILL)
    src, lengths, _ = batch()
    found, wanted = (model.encoder(src, lengths)["encoder_out"][0] for model in (fast, plain))
    assert src.eq(PAD).any() and (found - wanted).abs().max() <= 1e-9


@pytest.mark.parametrize("length", [products.SHORT, products.SHORT + 1])
def test_attention_of_short_sentences_is_by_products(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dropout; of longer ones it is by torch's kernel, which keeps no scores. Either is the twin's."""
    fast, plain, _ = pair("translation", torch.float64, **STILL)
    words = torch.randint(4, 20, (2, length))
    calls: list[str] = []
    for name in ("by_products", "by_kernel"):
        of = getattr(attention, name)
        monkeypatch.setattr(attention, name, lambda *args, of=of, name=name: calls.append(name) or of(*args))
    found, wanted = (model(words, torch.full((2,), length), words)[0] for model in (fast.eval(), plain.eval()))
    assert set(calls) == {"by_products" if length == products.SHORT else "by_kernel"}
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)  # fairseq's softmax is in float32


@pytest.mark.parametrize("mode", [True, False])
def test_every_module_is_in_the_mode_of_the_model(mode: bool) -> None:
    """Also one that was in another, when the model was in this one already."""
    model, _ = KINDS["translation"](admin_fast="on")
    model.train(mode)
    model.decoder.layers[1].train(not mode)
    assert model.train(mode) is model and {module.training for module in model.modules()} == {mode}


@pytest.mark.parametrize("scheme", ["admin", "pre-ln"])
def test_modules_called_by_themselves_give_their_outputs(scheme: str) -> None:
    """Not what is still to be computed, which their layer alone can read."""
    model, _ = KINDS["translation"](admin_fast="on", admin_scheme=scheme, dropout=0.1, attention_dropout=0.1)
    layer = model.train().encoder.layers[0]
    x = torch.randn(2, 3, layer.embed_dim)
    inner = layer.fc1(x)
    mixed, _ = layer.self_attn(x, x, x, key_padding_mask=attention.Mask())
    outputs = [inner, layer.activation_dropout_module(inner), layer.fc2(inner), mixed]
    assert [type(it) for it in outputs] == [Tensor] * 4


def test_left_padded_targets(exact_softmax) -> None:
    """Causality does not hide padding that comes first."""
    fast, plain, _ = pair("translation", torch.float64, **STILL)
    src, lengths, prev = batch()
    prev = prev.flip(1)
    # A position that sees only padding is no number in fairseq, too, but for its safe softmax; no loss is there.
    found = differences(fast, plain, lambda model: loss(model(src, lengths, prev)[0], prev))
    assert max(found.values()) <= 1e-9, found


@pytest.mark.parametrize("columns", [7, 16])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("small", [True, False], ids=["small", "large"])
@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
@pytest.mark.parametrize("inputs", [1, 2], ids=["self-attention", "encoder-attention"])
def test_products_are_the_kernel(
    inputs: int, mask: str, small: bool, p: float, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU's way, which has dropout, against the formula with the same elements dropped; gradients, too.

    It begins and ends with linear layers; the last one's input is made again instead of kept where it is large. Scores
    have as many columns as a vector has numbers, where there are fewer keys.
    """
    torch.manual_seed(1)
    monkeypatch.setattr(products, "VECTORS", {torch.backends.cpu.get_cpu_capability(): 8 * columns})
    length, sentences, heads, width = 7, 3, 4, 5
    hidden = torch.zeros(sentences, length, dtype=torch.bool)
    hidden[1, 5:] = hidden[2, :2] = True
    of = {"none": attention.Mask(), "causal": Causal(length), "padding": Padding(hidden)}[mask]
    channels, numbers = heads * width, [3] if inputs == 1 else [1, 2]
    given = [torch.randn(sentences, length, channels, dtype=torch.float64, requires_grad=True) for _ in numbers]
    first = nn.ModuleList(nn.Linear(channels, channels).double() for _ in range(3))
    kept = torch.rand(sentences * heads, length, length).ge(p)
    monkeypatch.setattr(products, "keep", lambda x, p: (kept, 1 / (1 - p)))
    monkeypatch.setattr(again, "WORTH", 2**40 if small else 0)

    rows = [linear(given[min(i, inputs - 1)]) for i, linear in enumerate(first)]
    q, k, v = (it.view(sentences, length, heads, width).transpose(1, 2) for it in rows)
    scores = q @ k.transpose(2, 3) / math.sqrt(width)
    if mask == "causal":
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf)
    elif mask == "padding":
        scores = scores.masked_fill(hidden[:, None, None], -math.inf)
    shares = scores.softmax(-1) * kept.view_as(scores) / (1 - p)
    last = nn.Linear(channels, 6).double()
    expected = last((shares @ v).transpose(1, 2).flatten(2))
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda it: sizes.append(it.numel()) or it, lambda it: it):
        sides = [(given[0], first)] if inputs == 1 else [(given[0], first[:1]), (given[1], first[1:])]
        found = products.by_products(of, p, False, heads, sides, last).computed()
    tokens = sentences * length * channels
    expected_sizes = [*(n * tokens for n in numbers), *(tokens for _ in given), *([tokens] if small else [])]
    weights = [it.weight.numel() for it in (*first, last)]
    rows_of_scores = [shares.numel() // length * columns, *([kept.numel()] if p else [])]
    assert sorted(sizes) == sorted([*expected_sizes, *weights, *rows_of_scores])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    leaves = [*given, *first.parameters(), *last.parameters()]
    weights = torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad((out * weights).sum(), leaves) for out in (found, expected))):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("learned", [True, False], ids=["learned omega", "first omega"])
def test_shortcut_norm_with_dropout(learned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the formula with the same elements dropped, gradients too; the sum and the mask are all that is new."""
    torch.manual_seed(1)
    norm = ShortcutNorm(24).double()
    norm.set_omega(1.7)
    if not learned:
        norm.freeze_omega()
    for p in norm.parameters():
        nn.init.normal_(p)
    branch, shortcut = (torch.randn(5, 3, 24, dtype=torch.float64, requires_grad=True) for _ in range(2))
    kept = torch.rand(5, 3, 24).ge(0.3)
    z = shortcut * norm.omega + branch * kept / 0.7
    expected = functional.layer_norm(z, (24,), norm.weight, norm.bias, norm.eps)

    monkeypatch.setattr(shortcut_module, "keep", lambda x, p: (kept.to(torch.int8).expand(x.shape), 1 / (1 - p)))
    layer = nn.Module()
    layer.final_layer_norm, layer.dropout_module, layer.fc2 = norm, FastDropout(0.3), nn.Identity()
    shortcut_module.fuse_norms(layer, Shared())
    assert isinstance(norm, FastShortcutNorm)
    own = {it.data_ptr() for it in (shortcut, norm.weight, norm.bias)}
    large: list[torch.dtype] = []

    def remember(it: Tensor) -> Tensor:
        if it.numel() == z.numel() and it.data_ptr() not in own:
            large.append(it.dtype)
        return it

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda it: it):
        found = norm((branch, shortcut))
    assert sorted(large, key=str) == [torch.float64, torch.int8]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights, leaves = torch.randn_like(z), [branch, shortcut, *norm.parameters()]
    assert len(leaves) == 4 + learned
    for a, b in zip(*(torch.autograd.grad((out * weights).sum(), leaves) for out in (found, expected))):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("scheme", ["admin", "pre-ln"])
@pytest.mark.parametrize("worth", [0, 2**40], ids=["made again", "kept"])
def test_a_sublayer_as_one_node_or_several(worth: int, scheme: str, onednn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks see tensors, so several nodes compute where there are any: the same numbers to the last bit."""
    monkeypatch.setattr(again, "WORTH", worth)
    dropped = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.1)
    rule = {"admin_init": "log"} if scheme == "admin" else {}
    model, loss_of = translation(admin_fast="on", admin_scheme=scheme, **rule, **dropped)
    model.double()
    nodes, gradients = [], []

    def seen(module: nn.Module, given: Any, output: Any) -> None:
        for each in (*given, *(output if isinstance(output, tuple) else [output])):
            assert not any(isinstance(it, Branch) for it in (each, *(each if isinstance(each, tuple) else ()))), module

    for hooked in (False, True):
        if hooked:
            for stack in (model.encoder, model.decoder):
                for module in stack.layers.modules():
                    module.register_forward_hook(seen)
        torch.manual_seed(3)
        found = loss_of(model)
        nodes.append(count_nodes(found.grad_fn))
        gradients.append(torch.autograd.grad(found, list(model.parameters())))
    assert nodes[0] < nodes[1]
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


@pytest.mark.parametrize("scheme", ["admin", "pre-ln"])
@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks(register: str, scheme: str, exact_softmax) -> None:
    """Do those on a layer's modules see as many backwards as on plain ones, and change nothing?"""
    rule = {"admin_init": "log"} if scheme == "admin" else {}
    fast, plain, loss_of = pair("translation", torch.float64, admin_scheme=scheme, **rule, **EXACT)
    counts = []
    for model in (fast, plain):
        counts.append(Counter())
        for stack in (model.encoder, model.decoder):
            for name, module in (each for layer in stack.layers for each in layer.named_children()):
                getattr(module, register)(functools.partial(count, counts[-1], name))
    assert max(differences(fast, plain, loss_of).values()) < 1e-9
    assert counts[0] == counts[1] and counts[0]["fc1"] == len(fast.encoder.layers) + len(fast.decoder.layers)


def count(seen: Counter, name: str, *_: Any) -> None:
    seen[name] += 1


@pytest.mark.parametrize(
    "register",
    [
        "register_module_forward_pre_hook",
        "register_module_forward_hook",
        "register_module_full_backward_hook",
        "register_module_full_backward_pre_hook",
    ],
)
def test_hooks_on_all_modules(register: str) -> None:
    """Do torch's hooks on every module there is see tensors, and change nothing?"""
    model, loss_of = translation(admin_fast="on", admin_init="log")
    seen, gradients = Counter(), []

    def hook(module: nn.Module, *given: Any) -> None:
        seen[type(module).__name__] += 1
        assert not any(isinstance(it, Branch) for it in (*given, *given[0]))

    for registers in (lambda hook: None, getattr(nn.modules.module, register)):
        torch.manual_seed(3)
        handle = registers(hook)
        try:
            gradients.append(torch.autograd.grad(loss_of(model), list(model.parameters())))
        finally:
            if handle is not None:
                handle.remove()
    assert all(torch.equal(a, b) for a, b in zip(*gradients))
    assert seen["FirstLinear"] == seen["LastLinear"] == len(model.encoder.layers) + len(model.decoder.layers)


def count_nodes(root: Any) -> int:
    """The nodes of a graph."""
    found, left = {root}, [root]
    while left:
        new = {it for it, _ in left.pop().next_functions if it is not None} - found
        found |= new
        left += new
    return len(found)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "input and second bias not"])
@pytest.mark.parametrize("onednn", [True, False], ids=["oneDNN", "MKL"])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_packed_layers_are_linear(layers: int, onednn: bool, frozen: bool) -> None:
    """Against as many layers of torch's; gradients, too, and what is kept for them is the input and the weights."""
    torch.manual_seed(1)
    several = [nn.Linear(24, 8 * (i + 1)) for i in range(layers)]
    x = torch.randn(5, 3, 24).transpose(0, 1)
    if frozen:
        several[-1].bias.requires_grad_(False)
    leaves = [x.requires_grad_(not frozen), *(p for it in several for p in it.parameters())]
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda it: kept.append(it) or it, lambda it: it):
        found = linear.packed_linear(onednn, x, *(it.weight for it in several), *(it.bias for it in several))
    expected = torch.cat([it(x) for it in several], 2)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad((out * weights).sum(), leaves) for out in (found, expected))):
        torch.testing.assert_close(a, b)
    if onednn or layers > 1:
        assert "_Packed" in str(found.grad_fn)
        assert {it.data_ptr() for it in kept} == {x.data_ptr(), *(it.weight.data_ptr() for it in several)}


def test_a_packed_layer_without_bias() -> None:
    x, layer, found = torch.randn(3, 5, requires_grad=True), nn.Linear(5, 4, bias=False), []
    for kind in (nn.Linear, FastLinear):
        layer.__class__, layer.onednn = kind, kind is FastLinear
        found.append(torch.autograd.grad(layer(x).square().sum(), (x, layer.weight)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("p", [0.1, 0.3])
@pytest.mark.parametrize("kind", ["dropout", *(activation.__name__ for activation in FUSED)])
def test_dropout_law(kind: str, p: float) -> None:
    """Elements are dropped with chance p, each on its own, the rest is scaled by 1 / (1 - p), and gradients likewise.

    Frequencies of n independent draws have a standard error of sqrt(p (1 - p) / n); five of them are allowed. The
    chance is a multiple of 2^-16, so the scale is right to 2^-16, relative.
    """
    torch.manual_seed(1)
    rows, columns = 1000, 1001
    x = torch.rand(rows, columns) + 0.5  # positive: relu and gelu then give no 0 of their own
    activation = next((it for it in FUSED if it.__name__ == kind), lambda x: x)
    module = FastDropout(p) if kind == "dropout" else ActivationDropout(p)
    module.activation = activation
    leaf = x.clone().requires_grad_()
    y = module.train()(leaf.clone())
    y.sum().backward()
    dropped = y.eq(0)

    def frequency(of: Tensor, expected: float) -> None:
        assert abs(of.double().mean() - expected) < 5 * math.sqrt(expected * (1 - expected) / of.numel())

    frequency(dropped, p)
    for shift in ((0, 1), (1, 0), (0, 4), (0, 2)):
        frequency(dropped & dropped.roll(shift, (0, 1)), p * p)
    frequency(dropped & module(x.clone()).eq(0), p * p)
    again = x.clone().requires_grad_()
    of_one = torch.autograd.grad(activation(again).sum(), again)[0]
    kept = (~dropped).float() / (1 - p)
    torch.testing.assert_close(y, activation(x) * kept, rtol=2**-14, atol=0)
    torch.testing.assert_close(leaf.grad, of_one * kept, rtol=2**-14, atol=1e-6)
    assert torch.equal(module.eval()(x.clone()), activation(x)) or kind == "gelu_accurate"


def test_relu_drops_no_gradient_of_its_own() -> None:
    """Where x is at most 0 the gradient is 0, and so it is where x was dropped."""
    module = ActivationDropout(0.5)
    module.activation = functional.relu
    torch.manual_seed(1)
    leaf = torch.randn(100, 100, requires_grad=True)
    y = module(leaf.clone())
    y.sum().backward()
    assert torch.equal(leaf.grad.ne(0), y.gt(0)) and not y[leaf.le(0)].any()
    assert 0.2 < y.gt(0).float().mean() < 0.3


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_profiles_the_same_omega(kind: str, padded: bool, onednn) -> None:
    """To the last bit, with dropout, and with the same random numbers drawn."""
    states, following = [], []
    for fast in ("on", "off"):
        dropping = {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1}
        model, loss_of = KINDS[kind](padded, admin_fast=fast, **dropping)
        torch.manual_seed(3)
        loss_of(model)
        states.append({key: value for key, value in model.state_dict().items() if "omega" in key})
        following.append(model)
    assert len(states[0]) > 4 and all(torch.equal(states[0][key], states[1][key]) for key in states[1])
    assert not any(getattr(module, "plain", False) for module in following[0].modules()), "still on the plain path"


@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_move_both_ways(kind: str) -> None:
    fast, plain, _ = pair(kind)
    assert list(fast.state_dict()) == list(plain.state_dict())
    torch.manual_seed(5)
    for model, other in ((fast, plain), (plain, fast)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn(parameter.shape)
        other.load_state_dict(model.state_dict())
        for (key, a), b in zip(fast.state_dict().items(), plain.state_dict().values()):
            assert torch.equal(a, b), key
    drawn = [KINDS[kind](admin_fast=fast)[0].state_dict() for fast in ("on", "off")]
    assert all(torch.equal(drawn[0][key], drawn[1][key]) for key in drawn[1]), "initial weights differ"


def test_generates_as_the_twin(onednn) -> None:
    """After fairseq's sign that the model will generate, to the last bit."""
    fast, plain, _ = pair("translation", dropout=0.1)
    src, lengths, prev = batch()
    found = []
    for model in (fast.eval(), plain.eval()):
        model.make_generation_fast_()
        assert all(module.plain for module in model.modules() if isinstance(module, Fast))
        with torch.no_grad():
            encoded = model.encoder(src, lengths)
            state: dict = {}
            steps = [model.decoder(prev[:, : t + 1], encoded, incremental_state=state)[0] for t in range(4)]
        found.append([encoded["encoder_out"][0], *steps])
    assert all(torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.parametrize("ratio", [1.0, 2.0], ids=["MKL", "oneDNN"])
def test_validates_as_the_twin(ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """And hands out attention weights, where they are asked for."""
    monkeypatch.setattr("fairseq_admin.fast.model.ahead", lambda: ratio)
    fast, plain, _ = pair("translation")
    inputs = batch()
    with torch.no_grad():
        (a, more), (b, others) = (model.eval()(*inputs) for model in (fast, plain))
    real = inputs[2].ne(PAD)
    torch.testing.assert_close(a[real], b[real], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(more["attn"][0][real], others["attn"][0][real], rtol=1e-4, atol=1e-6)
    assert fast.train()(*inputs)[1]["attn"] == [None]
    assert fast(*inputs, alignment_layer=0)[1]["attn"][0].shape == (8, 9, 11)


@pytest.mark.parametrize("fast", ["on", "off"])
@pytest.mark.parametrize("amp", [False, True])
def test_checkpointed_activations_recompute_the_same(fast, amp) -> None:
    """Gradients with dropout are those without checkpointing, and computed in the same types.

    To the last bit with the fast layers; without, a layer's input has its gradients summed in another order.
    """
    gradients, types = [], set()
    for checkpointed in (True, False):
        given = {"activation_dropout": 0.1, "admin_init": "log", "admin_fast": fast}
        model, loss_of = translation(checkpoint_activations=checkpointed, **given)
        model.encoder.layers[0].final_layer_norm.register_forward_hook(
            lambda module, inputs, y: types.add((y.dtype, torch.is_autocast_enabled("cpu")))
        )
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
            loss = loss_of(model)
        loss.backward()
        gradients.append([p.grad for name, p in model.named_parameters() if "k_proj.bias" not in name])
    tolerance = 0.0 if fast == "on" else 0.02 if amp else 1e-5
    assert all((a - b).abs().max() <= tolerance * b.abs().max() for a, b in zip(*gradients))
    assert len(gradients[0]) > 30 and len(types) == 1


def test_autocast(onednn) -> None:
    """In bfloat16, of eight bits: a product's error is some 0.4 %, and there are a dozen products in a row."""
    fast, plain, loss_of = pair("translation", admin_init="log", **STILL)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = differences(fast, plain, loss_of)
    # The gradient of a key's bias is 0 but for rounding.
    found = {name: value for name, value in found.items() if "k_proj.bias" not in name}
    assert max(found.values()) < 0.05, found


def test_a_half_shortcut_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """apex's norms, which fairseq takes on GPUs if they are there, put out half under autocast, and a norm's kernel is
    given float32 there, which on a CPU it is not: its backward wants all of one type.
    """
    seen, normed, differentiated = [], torch.native_layer_norm, torch.ops.aten.native_layer_norm_backward

    def as_on_gpus(z: Tensor, shape: Any, weight: Tensor, bias: Tensor, eps: float) -> Any:
        return normed(z.float(), shape, weight.float(), bias.float(), eps)

    def backward(gradient: Tensor, z: Tensor, shape: Any, *rest: Any) -> Any:
        seen.append({it.dtype for it in (gradient, z, *rest[:4])})
        return differentiated(gradient, z, shape, *rest)

    def half(module: nn.Module, inputs: Any, y: Tensor) -> Tensor:
        return y.bfloat16() if torch.is_autocast_enabled("cpu") else y

    def loss_under_autocast(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=model is fast):
            return loss_of(model)

    fast, plain, loss_of = pair("translation", admin_init="log", layernorm_embedding=True, **STILL)
    for stack in (fast.encoder, fast.decoder):
        stack.layernorm_embedding.register_forward_hook(half)
    monkeypatch.setattr(torch, "native_layer_norm", as_on_gpus)
    monkeypatch.setattr(torch.ops.aten, "native_layer_norm_backward", backward)
    found = differences(fast, plain, loss_under_autocast)
    assert max(value for name, value in found.items() if "k_proj.bias" not in name) < 0.05, found
    assert len(seen) > 10 and all(them == {torch.float32} for them in seen)


def test_waits_for_the_device_twice() -> None:
    """Whether the source has padding, and whether the target begins with it; fairseq's does in every layer."""

    class Waits(TorchDispatchMode):
        """Counts the questions whether something is so."""

        number = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            asked = function is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool
            self.number += asked
            return function(*args, **(kwargs or {}))

    counts = []
    for fast in ("on", "off"):
        model, loss_of = translation(admin_fast=fast, admin_init="log", encoder_layers=6)
        with Waits() as waits:
            loss_of(model).backward()
        counts.append(waits.number)
    # Two more are asked of fairseq's positions, of tensors that are on the CPU always; and one by stock's encoder.
    assert counts == [2 + 2, 7 + 3]


def test_few_operations(onednn) -> None:
    """Packed weights are not copied, each stack's ω are one sum, and a layer's masks one draw."""
    made: Counter[str] = Counter()

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made[function.__name__.split(".")[0]] += 1
            return function(*args, **(kwargs or {}))

    model, loss_of = translation(admin_fast="on", admin_init="log", dropout=0.1, attention_dropout=0.0)
    model.double().float()  # as every cast and move, this gives each parameter a storage of its own first
    with Operations():
        loss_of(model).backward()
    layers, stacks = len(model.encoder.layers) + len(model.decoder.layers), 2
    assert made["cat"] == made["zeros"] == 0 and made["_foreach_add"] == stacks
    assert made["random_"] == layers + stacks  # an embedding's dropout, too
    assert made["copy_"] == 0, made  # of weights' gradients that come turned round
    assert not model.encoder.shared.omegas, "left for what runs without the stack"


def test_masks_drawn_together_differ() -> None:
    """Each of a layer's is a draw of its own, and the next batch has others: shares agree by chance alone."""
    module = LeftToTheNorm(0.5)
    module.norms, branch = 3, torch.randn(40, 50, 50)
    masks = [module.mask_of(branch, 0.5, number == 0)[0] for _ in range(2) for number in range(3)]
    for a, b in itertools.combinations(masks, 2):
        # Of n coins; five standard errors of sqrt(1 / 4 n).
        assert abs(a.eq(b).double().mean() - 0.5) < 2.5 / math.sqrt(branch.numel())


@pytest.mark.parametrize("ratio", [1.0, 2.0], ids=["MKL", "oneDNN"])
def test_makes_norms_outputs_again(ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of keeping them; gradients are the same, to the last bit.

    But for the encoder's last, which the decoder gets transposed, and the decoder's, if torch's linear layer takes it.
    """
    monkeypatch.setattr("fairseq_admin.fast.model.ahead", lambda: ratio)
    monkeypatch.setattr("fairseq_admin.fast.model.SMALLEST", 0)
    kept, gradients = [], []
    for worth in (2**40, 0):
        monkeypatch.setattr(again, "WORTH", worth)
        model, loss_of = translation(admin_fast="on", admin_init="log", dropout=0.1, attention_dropout=0.1)
        storages: dict[int, int] = {}

        def remember(it: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storages[it.untyped_storage().data_ptr()] = it.untyped_storage().nbytes()
            return it

        torch.manual_seed(3)
        with torch.autograd.graph.saved_tensors_hooks(remember, lambda it: it):
            found = loss_of(model)
        kept.append(sum(storages.values()))
        del found
        torch.manual_seed(3)
        again_and_again = loss_of(model)
        for _ in range(2):
            again_and_again.backward(retain_graph=True)
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))
    src, _, prev = batch(padded=True)
    layers, width = len(model.encoder.layers), model.encoder.layers[0].embed_dim
    # What each attention's last projection takes is made again, too.
    made = 2 * layers - 1 + layers, 3 * layers - (ratio == 1) + 2 * layers
    assert kept[0] - kept[1] == 4 * width * (made[0] * src.numel() + made[1] * prev.numel())


def test_what_is_changed_in_place_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook may do so."""
    gradients = []
    for worth in (2**40, 0):
        monkeypatch.setattr(again, "WORTH", worth)
        model, loss_of = translation(admin_fast="on", admin_init="log", **STILL)
        norm = model.encoder.layers[0].self_attn_layer_norm
        norm.register_forward_hook(lambda norm, inputs, output: output.mul_(2))
        loss_of(model).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


class Held:
    """Weights of a layer as fairscale holds them: there in the layer's forward and in its backward."""

    def __init__(self, layer: nn.Module, weights: list[Tensor]) -> None:
        self.weights, self.values = weights, [weight.detach().clone() for weight in weights]
        self.free()
        layer.register_forward_pre_hook(self.put_back)
        layer.register_forward_hook(self.free)

    def put_back(self, *_: Any) -> None:
        for weight, values in zip(self.weights, self.values):
            weight.data.copy_(values)

    def free(self, *given: Any) -> None:
        for weight in self.weights:
            weight.data.fill_(math.nan)
        if given:
            output = given[-1]
            (output[0] if isinstance(output, tuple) else output).register_hook(self.put_back)


@pytest.mark.parametrize("flat", [True, False])
def test_what_is_freed_is_not_needed(flat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """fully_sharded's weights are views of one tensor (flat), or marked."""
    monkeypatch.setattr(again, "WORTH", 0)
    gradients = []
    for freed in (False, True):
        model, loss_of = translation(admin_fast="on", admin_init="log", **STILL)
        weights = list(model.parameters())
        for layer in (*model.encoder.layers, *model.decoder.layers) if freed else ():
            norms = [module for module in layer.modules() if isinstance(module, ShortcutNorm)]
            named = [(norm, name, weight) for norm in norms for name, weight in norm.named_parameters()]
            Held(layer, [weight for _, _, weight in named])
            for norm, name, weight in named:
                weight._is_sharded = not flat
                if flat:
                    delattr(norm, name)
                    setattr(norm, name, weight.view(-1))
        loss_of(model).backward()
        gradients.append([weight.grad for weight in weights])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


def test_packs_what_is_apart() -> None:
    """A deep copy has each parameter in a storage of its own; another model has them in one, in another order."""
    model, loss_of = translation(admin_fast="on", **STILL, admin_init="log")
    other = copy.deepcopy(model)
    for module in other.modules():
        if isinstance(module, FastAttention):
            linear.put_together([module.q_proj.weight, module.v_proj.weight, module.k_proj.weight])
    gradients = []
    for each in (model, copy.deepcopy(model), other):
        loss_of(each).backward()
        gradients.append([p.grad for p in each.parameters()])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*gradients))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quant_noise_pq": 0.1}, "stock layers, for --quant-noise-pq has no faster ones"),
        ({"cross_self_attention": True}, "stock layers, for --cross-self-attention has no"),
        ({"activation_fn": "tanh"}, "stock feed-forward layers, for --activation-fn tanh has no"),
        ({}, None),
    ],
    ids=["quantisation noise", "cross-self-attention", "tanh", "all fast"],
)
def test_says_what_stays_stock(options: dict, said: str | None, caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    """Once, with the option's name."""
    monkeypatch.setattr("fairseq_admin.fast.model.ahead", lambda: 1.0)
    with caplog.at_level(logging.INFO):
        build("transformer_admin_tiny", admin_fast="on", **options)
    lines = [record.getMessage() for record in caplog.records if "--admin-fast" in record.getMessage()]
    assert len(lines) == (said is not None) and all(said in line for line in lines)


@pytest.mark.parametrize(("width", "ffn", "used"), [(16, 128, False), (64, 128, True)])
def test_small_models_keep_mkl(width: int, ffn: int, used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their sizes alone: a probe of something so small comes out now so, now so, and resumed runs would differ."""
    monkeypatch.setattr("fairseq_admin.fast.model.ahead", lambda: 2.0)
    sizes = {"encoder_embed_dim": width, "encoder_ffn_embed_dim": ffn, "decoder_embed_dim": width}
    model = build("transformer_admin_tiny", admin_fast="on", **sizes)
    assert any(isinstance(module, FastLinear) and module.onednn for module in model.modules()) is used


def test_probes_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves as many as there were. Two threads' probe on a busy machine chose oneDNN where MKL is level."""
    used = []
    monkeypatch.setattr(linear, "product", lambda *_: used.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        linear.ahead()
        assert set(used) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# Products of many shapes, as batches are; then the gradient of an output layer's weights, 40 MB of logits.
OF_MANY_SHAPES = """
import torch
from fairseq_admin.fast import linear
from recipes.preflight.weigh import own_memory

torch.set_num_threads(1)
linear.ahead()
weight = torch.ones(256, 128)
with torch.no_grad():
    linear.product(True, torch.ones(400, 128), weight)
    before = own_memory("VmRSS")
    for tokens in range(700, 1000):
        linear.product(True, torch.ones(tokens, 128), weight)
    print(own_memory("VmRSS") - before)
    gradient, x = torch.ones(1000, 10000), torch.ones(1000, 64)
    before = own_memory("VmHWM")
    linear.product_backward(True, gradient, x, None, (False, True, False))
    print(own_memory("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch without oneDNN")
def test_onednn_keeps_few_products_and_copies_no_logits():
    """300 shapes leave 32 products, of at most 1 MB: without the bound 260 MB were kept. A copy would be 40 MB."""
    environment = {name: value for name, value in os.environ.items() if name not in linear.CACHES}
    done = subprocess.run(
        [sys.executable, "-c", OF_MANY_SHAPES], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    kept, copied = (int(line) / 1e6 for line in done.stdout.split())
    assert kept < 110 and copied < 20
