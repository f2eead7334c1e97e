"""Models as users write them: which sub-layers attach finds, and that the fold is exact."""

from __future__ import annotations

import copy
import functools
import random

import pytest
import torch
import torch.nn.functional as F
from post_ln import SITES, C, Layer, Stack, X, apart, check_folds, layer, outputs, with_omega
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, prune

import fairseq_admin.pytorch as admin


def three_weights(self, x):
    """Queries, keys and values have separate weights, passed in one call."""
    out, bias, x = self.attn.out_proj, self.attn.in_proj_bias, x.transpose(0, 1)
    weights = {f"{name}_proj_weight": getattr(self, name) for name in "qkv"}
    options = {"use_separate_proj_weight": True, "need_weights": False, **weights}
    args = (C, 2, None, bias, None, None, False, 0.0, out.weight, out.bias)
    return F.multi_head_attention_forward(x, x, x, *args, **options)[0].transpose(0, 1)


class Gated(nn.Module):
    """A norm that reads x as its second argument."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(C))

    def forward(self, h, gate):
        return self.weight * F.rms_norm(h * F.silu(gate), (C,))


class AddNorm(nn.LayerNorm):
    def forward(self, f, x):
        return super().forward(x + f)


@functools.lru_cache
def causal(length):
    return torch.full((length, length), -1e9, dtype=torch.float64).triu(1)


def padded(x):
    buffer = x.new_zeros(2, 7, C)
    buffer[:, :5] = x
    return buffer


def first(norm):
    """Layers whose first sub-layer is norm(layer, x, f)."""
    return layer(lambda s, x: s.b((y := norm(s, x, s.attend(x))) + s.feed(y)))


def weight(rows=C):
    return nn.Parameter(torch.randn(rows, C) / 3)


CONVOLUTIONS = {"c1": lambda: nn.Conv1d(C, 12, 1), "c2": lambda: nn.Conv1d(12, C, 1)}
LAYERS = {
    "a convolution": layer(
        feed=lambda s, x: s.c2(s.c1(x.transpose(1, 2)).relu()).transpose(1, 2), parts=CONVOLUTIONS),
    "flattened": layer(feed=lambda s, x: s.down(F.gelu(s.up(x.reshape(-1, C)))).view_as(x)),
    "a function for dropout": layer(feed=lambda s, x: s.down(F.gelu(s.up(F.dropout(x, 0.1, s.training))))),
    "three weights in a call": layer(attend=three_weights, parts=dict.fromkeys("qkv", weight)),
    "positions before q and k": layer(
        attend=lambda s, x: s.attn(x + s.p, x + s.p, x)[0], parts={"p": lambda: weight(5)}),
    "a mask that is kept": layer(attend=lambda s, x: s.attn(x, x, x, attn_mask=causal(5), need_weights=False)[0]),
    "a sparse adjacency": layer(
        feed=lambda s, x: Layer.feed(s, torch.stack([torch.sparse.mm(torch.eye(5).double().to_sparse(), z) for z in x]))
    ),
    "a padded buffer": layer(feed=lambda s, x: Layer.feed(s, padded(x))[:, :5]),
    "x @ W.t()": layer(feed=lambda s, x: x @ s.w.t(), parts={"w": weight}),
    "rows of a weight": layer(feed=lambda s, x: F.linear(x.tanh(), s.w[:C]), parts={"w": lambda: weight(12)}),
    "noise in evaluation": layer(feed=lambda s, x: s.down(s.up(x).tanh() + torch.randn(16).double())),
    "a branch that is kept": layer(feed=lambda s, x: setattr(s, "kept", Layer.feed(s, x)) or s.kept),
    "a norm with a gate": layer(
        lambda s, x: s.b((y := s.a(x + s.g(s.attend(x), x))) + s.feed(y)), parts={"g": Gated}),
    "a fused norm": layer(
        lambda s, x: s.b((y := s.a(s.attend(x), x)) + s.feed(y)), parts={"a": lambda: AddNorm(C)}),
    "fused norms": layer(
        lambda s, x: s.b(s.feed(y := s.a(s.attend(x), x)), y), parts=dict.fromkeys("ab", lambda: AddNorm(C))),
    "axes moved after the sum": first(lambda s, x, f: s.a((x + f).transpose(0, 1)).transpose(0, 1)),
    "cut and joined": first(lambda s, x, f: s.a(torch.cat([x[:, :3], x[:, 3:]], 1) + f)),
    "a slice": first(lambda s, x, f: s.a(x[:, :4] + f[:, :4])),
    "transposed": first(lambda s, x, f: s.a(x.transpose(0, 1) + f.transpose(0, 1)).transpose(0, 1)),
    "flat": first(lambda s, x, f: s.a(x.flatten(0, 1) + f.flatten(0, 1)).view_as(x)),
    "with an axis more": first(lambda s, x, f: s.a(x.unsqueeze(1) + f.unsqueeze(1)).squeeze(1)),
    "detached": first(lambda s, x, f: s.a(x.detach() + f)),
    "dropout on the shortcut": first(lambda s, x, f: s.a(F.dropout(x, 0.1, s.training) + f)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_every_sublayer_is_found_and_folded(name):
    causal.cache_clear()
    fresh = admin.attach(Stack(LAYERS[name]), X)  # before any forward
    model = Stack(LAYERS[name])
    check_folds(model, X, [6])
    admin.attach(model, X)
    assert list(admin.omegas(fresh)) == list(admin.omegas(model))


class Again(Stack):
    """Adds positions, or the input of the stack, in every layer."""

    def __init__(self, positions):
        super().__init__(layer(lambda s, x, e: s.b((y := s.a(x + s.attend(x) + e)) + s.feed(y))))
        self.positions = nn.Parameter(torch.randn(5, C).double()) if positions else None

    def forward(self, x):
        x = self.before(x if self.positions is None else x + self.positions)
        again = x if self.positions is None else self.positions
        for each in self.layers:
            x = each(x, again)
        return self.out(x)


class Siamese(Stack):
    def forward(self, one, other):
        return super().forward(one) - super().forward(other)


class Named(Stack):
    """Its arguments have names of ours, and it returns what is inside it, too."""

    def forward(self, omega, unfoldable=None, model=0.0):
        features = self.layers[0](self.before(omega + model))
        return {"features": features, "logits": self.out(self.layers[2](self.layers[1](features)))}


class Rows(nn.Module):
    """Alternates between a table's rows and columns, each in its own shape."""

    def __init__(self):
        super().__init__()
        self.rows, self.columns = Layer(), Layer()

    def forward(self, x):
        return self.columns(self.rows(x.transpose(0, 1)).transpose(0, 1))


MODELS = {
    "positions in every layer": (lambda: Again(True), X, [6]),
    "one encoder, two inputs": (Siamese, (X, X.flip(0)), [6]),
    "names of ours": (Named, {"omega": X, "model": X.flip(0)}, [6]),
    "rows and columns": (lambda: Stack(Rows), X, [12]),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_its_stacks_and_is_folded(name):
    make, batch, stacks = MODELS[name]
    check_folds(make(), batch, stacks)


def test_the_input_again_in_every_layer_is_part_of_the_shortcut(caplog):
    """In the first layer, the input is x itself: x + f(x) + x has another factor at the shortcut."""
    check_folds(Again(False), X, [5])
    assert caplog.messages[-1:] == ["Admin is off: layers.0.a reads a sum with a factor at the shortcut, as DeepNorm's"]


@pytest.mark.parametrize("number", [torch.rand, lambda _: torch.tensor(random.random())])
def test_a_layer_that_is_left_out_at_random_is_no_matter(number):
    left_out = layer(lambda s, x: x if s.training and number(1).item() < 0.5 else Layer.forward(s, x))
    for _ in range(5):
        check_folds(Stack(left_out).train(), X, [6])


class Merged(nn.Linear):
    """An adapter that merges in eval(), and computes in train()."""

    merged = False

    def train(self, mode=True):
        if mode == self.merged:
            self.weight.data = self.weight.data + (-1 if mode else 1) * torch.eye(C, dtype=self.weight.dtype)
            self.merged = not mode
        return super().train(mode)

    def forward(self, x):
        return super().forward(x) + (0 if self.merged else x)


def test_adapters_that_merge_in_eval_are_as_they_were():
    model = nn.Sequential(Merged(C, C), Stack()).double()
    nn.init.constant_(model[0].weight, 0.5)  # exact in binary, so merging does not round
    admin.attach(model, X)
    assert model.training and not model[0].merged and model[0].weight.eq(0.5).all()
    model[1].layers[1].register_forward_pre_hook(lambda layer, args: (args[0] + ("_admin" in vars(model)),))
    with pytest.raises(ValueError, match="the folded model is off by"):
        admin.fold(model, X)
    assert model.training and not model[0].merged and model[0].weight.eq(0.5).all() and len(admin.omegas(model)) == 6


class ByKeyword(Stack):
    def forward(self, x):
        x = self.before(x)
        for each in self.layers:
            x = each(x=x) if self.training else each(x)
        return x


def test_a_layer_called_by_keyword_in_training():
    model = with_omega(admin.attach(ByKeyword(), X))
    assert apart(outputs(model.train(), X), outputs(model.eval(), X)) < 1e-12


def test_twelve_layers_compiled_one_by_one_take_one_graph_more():
    graphs, x = [], X.float()
    for attached in (False, True):
        torch._dynamo.reset()
        model, counter = Stack().float().eval(), CompileCounter()
        model.layers.extend(Layer() for _ in range(9))
        if attached:
            with_omega(admin.attach(model, x))
        plain = model(x)
        for each in model.layers:
            each.compile(backend=counter, fullgraph=True)
        torch.testing.assert_close(model(x), plain)
        graphs.append(counter.frame_count)
    assert graphs[1] <= graphs[0] + 1


@pytest.mark.parametrize("whole", [True, False])
def test_what_was_compiled_before_attach_is_compiled_again(whole):
    model = Stack().eval()
    compiled = torch.compile(model if whole else lambda x: model(x), backend="eager")
    stock = compiled(X)
    admin.attach(model, X)
    assert (compiled(X) - stock).abs().max() > 1e-3
    torch.testing.assert_close(compiled(X), model(X))
    admin.fold(model)
    torch.testing.assert_close(compiled(X), model(X))


def test_attach_compiles_nothing():
    """Attach follows what a compiled function calls, and compiles neither the function nor its own code in it."""
    counter = CompileCounter()
    model = admin.attach(Stack(layer(feed=torch.compile(Layer.feed, backend=counter))), X)
    assert list(model._admin.norms) == SITES and counter.frame_count == 0


@pytest.mark.parametrize("wrap", [functools.partial(torch.compile, backend="eager"), checkpoint_wrapper])
def test_layers_wrapped_after_attach_are_folded(wrap):
    model, stock = with_omega(admin.attach(Stack(), X)), Stack()
    model.layers[1] = wrap(model.layers[1])
    before = model(X)
    stock.load_state_dict(admin.folded_state_dict(model))
    assert (admin.fold(model, X)(X) - before).abs().max() < 1e-12
    assert torch.equal(stock(X), model(X))


class LoRA(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.low = base, nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.low(x)


def replace(layer, by):
    layer.down = by(layer.down)


PUT_ON = {
    "weight_norm": lambda layer: parametrizations.weight_norm(layer.down),
    "spectral_norm": lambda layer: parametrizations.spectral_norm(layer.down),
    "pruning": lambda layer: prune.l1_unstructured(layer.down, "weight", 0.3),
    "LoRA": lambda layer: replace(layer, LoRA),
    "a wrapper": lambda layer: replace(layer, nn.Sequential),
    "another module": lambda layer: replace(layer, lambda down: nn.Linear(2 * C, C)),
    "a copy": lambda layer: replace(layer, copy.deepcopy),
    "quantised": lambda layer: torch.ao.quantization.quantize_dynamic(layer, {nn.Linear}, inplace=True),
    "LoRA in attention": lambda layer: setattr(layer.attn, "out_proj", LoRA(layer.attn.out_proj)),
}


@pytest.mark.parametrize("change", PUT_ON)
def test_what_was_put_on_a_writer_after_attach_is_named(change):
    model = admin.attach(Stack().float(), X.float())
    PUT_ON[change](model.layers[1])
    for call in (model, lambda x: admin.fold(model), lambda x: admin.folded_state_dict(model)):
        with pytest.raises(
            ValueError, match=r"^layers\.1\.(down|attn)\S* has changed since attach: it was replaced, wr"
        ):
            call(X.float())


def test_a_writer_that_is_tied_after_attach_is_named_by_the_fold():
    model = admin.attach(Stack(), X)
    model.out.weight = model.layers[2].attn.out_proj.weight
    with pytest.raises(ValueError, match=r"^layers\.2\S+ has changed since attach: it is tied, \S+ and \S+\. Untie"):
        admin.fold(model)
