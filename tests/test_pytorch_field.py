"""Models as users write them: a feed-forward inside forward, positions added before q and k, adapters, wrappers."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from post_ln import Stack, X, perturbed
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional
from torch.nn.utils import parametrizations, prune

import fairseq_admin.pytorch as admin

C = 8
NAMES = [f"layers.{i}.{norm}" for i in range(3) for norm in "ab"]


class Layer(nn.Module):
    """A Post-LN layer whose feed-forward is written inside forward."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(C, 2, batch_first=True)
        self.a, self.b = nn.LayerNorm(C), nn.LayerNorm(C)
        self.up, self.down = nn.Linear(C, 2 * C), nn.Linear(2 * C, C)

    def branch(self, h):
        return self.down(functional.gelu(self.up(h)))

    def attend(self, h):
        return self.attn(h, h, h, need_weights=False)[0]

    def forward(self, h):
        h = self.a(h + self.attend(h))
        return self.b(h + self.branch(h))


class ThreeWeights(Layer):
    """Queries, keys and values have separate weights, passed in one call."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(C, C) / 4) for _ in "qkv")

    def attend(self, h):
        out, bias, x = self.attn.out_proj, self.attn.in_proj_bias, h.transpose(0, 1)
        weights = {f"{name}_proj_weight": getattr(self, name) for name in "qkv"}
        options = {"use_separate_proj_weight": True, "need_weights": False, **weights}
        args = (C, 2, None, bias, None, None, False, 0.0, out.weight, out.bias)
        return functional.multi_head_attention_forward(x, x, x, *args, **options)[0].transpose(0, 1)


class Positions(Layer):
    """Adds positions to x before q and k, as in detection Transformers."""

    def __init__(self):
        super().__init__()
        self.places = nn.Parameter(torch.randn(5, C))

    def attend(self, h):
        return self.attn(h + self.places, h + self.places, h, need_weights=False)[0]


def test_a_branch_inside_forward_is_a_site():
    model = admin.attach(Stack(ThreeWeights).double(), X)
    assert list(admin.omegas(model)) == NAMES
    assert all(omega.eq(6**0.5).all() for omega in admin.omegas(model).values())
    perturbed(model).eval()
    before = model(X)
    admin.fold(model, X)
    assert (model(X) - before).abs().max() < 1e-12


def test_layers_compiled_one_by_one_take_one_graph_more():
    graphs, x = [], X.float()
    for attached in (False, True):
        torch._dynamo.reset()
        model, counter = Stack(Layer).eval(), CompileCounter()
        if attached:
            perturbed(admin.attach(model, x))
        plain = model(x)
        for layer in model.layers:
            layer.compile(backend=counter, fullgraph=True)
        torch.testing.assert_close(model(x), plain)
        graphs.append(counter.frame_count)
    assert graphs[1] <= graphs[0] + 1


def test_positions_before_q_and_k_are_kept_or_skipped(caplog):
    model = Stack(Positions).double()
    kept = admin.attach(copy.deepcopy(model), X, unfoldable="keep")
    assert "Admin: Stack cannot be folded: layers.0.a has a shortcut" in caplog.text
    assert list(admin.omegas(kept)) == NAMES and admin.omegas(kept)["layers.1.a"].eq(6**0.5).all()
    optimizer = torch.optim.AdamW(kept.parameters(), 1e-2)
    kept(X).square().sum().backward()
    optimizer.step()
    assert all(omega.std() > 0 for omega in admin.omegas(kept).values())
    with pytest.raises(ValueError, match=r"^Stack cannot be folded: layers\.0\.a has .* Keep it with its omega\.$"):
        admin.fold(kept, X)
    assert len(admin.omegas(kept)) == 6
    caplog.clear()
    skipped = admin.attach(model, X, unfoldable="skip")
    assert list(admin.omegas(skipped)) == NAMES[1::2] and "Admin is off: layers.0.a" in caplog.text
    before = perturbed(skipped).eval()(X)
    assert (admin.fold(skipped, X)(X) - before).abs().max() < 1e-12


class Rows(nn.Module):
    """Alternates between a table's rows and columns, each in its own shape."""

    def __init__(self):
        super().__init__()
        self.rows, self.columns = Layer(), Layer()

    def forward(self, h):
        return self.columns(self.rows(h.transpose(0, 1)).transpose(0, 1))


def test_rows_and_columns_are_one_stack():
    model = admin.attach(Stack(Rows).double(), X)
    assert len(admin.omegas(model)) == 12 and all(omega.eq(12**0.5).all() for omega in admin.omegas(model).values())


class Every(Stack):
    """Also returns every layer's output, and the sum before a norm if the layers keep it."""

    def forward(self, h):
        every = [self.before(h)]
        for layer in self.layers:
            every.append(layer(every[-1]))
        return every[-1], every, vars(self.layers[1]).get("sum")


class Summed(Layer):
    def forward(self, h):
        self.sum = h + self.attend(h)
        return self.a(self.sum)


@pytest.mark.parametrize("layer", [Layer, Summed])
def test_streams_that_a_model_returns_are_not_compared(layer):
    model = perturbed(admin.attach(Every(layer).double(), X)).eval()
    before = model(X)[0]
    assert (admin.fold(model, X)(X)[0] - before).abs().max() < 1e-12


class Merged(nn.Linear):
    """An adapter that merges in eval(), and computes in train()."""

    merged = False

    def train(self, mode=True):
        if mode == self.merged:
            self.weight.data = self.weight.data + (-1 if mode else 1) * torch.eye(C, dtype=self.weight.dtype)
            self.merged = not mode
        return super().train(mode)

    def forward(self, h):
        return super().forward(h) + (0 if self.merged else h)


def test_adapters_that_merge_in_eval_are_as_they_were():
    model = nn.Sequential(Merged(C, C), Every(Layer)).double()
    nn.init.constant_(model[0].weight, 0.5)  # exact in binary, so merging does not round
    admin.attach(model, X)
    assert model.training and not model[0].merged and model[0].weight.eq(0.5).all()
    model[1].layers[1].register_forward_pre_hook(lambda layer, args: (args[0] + 0.1,))
    with pytest.raises(ValueError, match="the folded model is off by"):
        admin.fold(model, X)
    assert model.training and not model[0].merged and model[0].weight.eq(0.5).all()


class ByKeyword(Stack):
    def forward(self, h):
        h = self.before(h)
        for layer in self.layers:
            h = layer(h=h) if self.training else layer(h)
        return h


def test_a_layer_called_by_keyword_in_training():
    model = perturbed(admin.attach(ByKeyword(Layer).double(), X))
    trained = model.train()(X)
    torch.testing.assert_close(trained, model.eval()(X), rtol=0, atol=1e-12)


@pytest.mark.parametrize("whole", [True, False])
def test_what_was_compiled_before_attach_is_compiled_again(whole):
    model = Stack(Layer).eval()
    compiled = torch.compile(model if whole else lambda x: model(x), backend="eager")
    x = X.float()
    stock = compiled(x)
    admin.attach(model, x)
    assert (compiled(x) - stock).abs().max() > 1e-3
    torch.testing.assert_close(compiled(x), model(x))
    admin.fold(model)
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("wrap", [partial(torch.compile, backend="eager"), checkpoint_wrapper])
def test_layers_wrapped_after_attach_are_folded(wrap):
    model, stock = perturbed(admin.attach(Stack(Layer).double(), X)), Stack(Layer).double()
    model.layers[1] = wrap(model.layers[1])
    before = model(X)
    stock.load_state_dict(admin.folded_state_dict(model))
    assert (admin.fold(model, X)(X) - before).abs().max() < 1e-12
    assert torch.equal(stock(X), model(X))


def test_attach_compiles_nothing():
    """Attach follows what a compiled function calls, and compiles neither the function nor its own code in it."""
    counter = CompileCounter()
    model = Stack(type("Compiled", (Layer,), {"branch": torch.compile(Layer.branch, backend=counter)})).double()
    admin.attach(model, X)
    assert list(admin.omegas(model)) == NAMES and counter.frame_count == 0


def test_a_decoder_that_attends_to_one_vector_can_attend_to_more_after_the_fold():
    """With one key, the queries have no effect. Their weights read the shortcut nevertheless."""
    layer = nn.TransformerDecoderLayer(C, 2, 16, dropout=0.0, batch_first=True)
    model, memory = nn.TransformerDecoder(layer, 2).double(), torch.randn(2, 4, C).double()
    perturbed(admin.attach(model, (X, memory[:, :1])))
    before = model(X, memory)
    assert (admin.fold(model)(X, memory) - before).abs().max() < 1e-12


UNMOVED = {
    "early": "layers.0.a, like layers.0.b and layers.1.a and 3 more, is trained without its omega: make the optimizer",
    "replaced": "Admin: layers.1.b has been replaced since attach, and its omega with it: replace it before.",
    "frozen": "",
    "late": "",
}


@pytest.mark.parametrize("case, message", UNMOVED.items())
def test_an_omega_that_does_not_move_is_said_once(case, message, caplog):
    model, x, stranger = Stack(Layer), X.float(), nn.Linear(2, 2)
    early = list(model.parameters())
    admin.attach(model, x)
    caplog.clear()
    if case == "replaced":
        model.layers[1].b = nn.LayerNorm(C)
    for site in model._admin.sites if case == "frozen" else []:
        site.norm.omega_delta.requires_grad_(False)
    parameters = early if case == "early" else [p for p in model.parameters() if p.requires_grad]
    for optimizer in 2 * [torch.optim.SGD(stranger.parameters()), torch.optim.AdamW(parameters)]:
        model(x).sum().backward()
        optimizer.step()
    assert len(caplog.records) == bool(message) and message in caplog.text


PUT_ON = {
    "_WeightNorm": lambda layer: parametrizations.weight_norm(layer.up),
    "_SpectralNorm": lambda layer: parametrizations.spectral_norm(layer.up),
    "L1Unstructured": lambda layer: prune.l1_unstructured(layer.up, "weight", 0.3),
    "LoRA": lambda layer: layer.set_submodule("up", nn.ModuleDict({"base": layer.up, "low": nn.Linear(C, C)})),
    "tying": lambda layer: setattr(layer.b, "weight", layer.a.weight),
    "a copied norm": lambda layer: setattr(layer, "b", copy.deepcopy(layer.b)),
}


@pytest.mark.parametrize("change", PUT_ON)
def test_what_was_put_on_after_attach_is_named_by_the_fold(change):
    model = admin.attach(Stack(Layer).double(), X)
    PUT_ON[change](model.layers[1])
    with pytest.raises(ValueError, match=r"^layers\.1\.(up|b)\S* has changed since attach: "):
        admin.fold(model)


@pytest.mark.parametrize("change", ["_WeightNorm", "_SpectralNorm"])
def test_what_was_put_on_before_attach_is_named(change):
    model = Stack(Layer).double()
    PUT_ON[change](model.layers[1])
    with pytest.raises(ValueError, match=r"layers\.1\.b .* linear in layers\.1\.up, a ParametrizedLinear \("):
        admin.attach(model, X)


def test_meta_and_inference_mode_are_refused_in_one_line():
    with torch.device("meta"):
        model = Stack(Layer)
    with pytest.raises(ValueError, match="cannot follow torch.inference_mode or the meta device"):
        admin.attach(model, torch.ones(2, 5, C, device="meta"))
    attached = admin.attach(Stack(Layer).double(), X)
    with torch.inference_mode():
        x = X.clone()
        for call, model in ((admin.attach, Stack(Layer).double()), (admin.fold, attached)):
            with pytest.raises(ValueError, match="cannot follow torch.inference_mode"):
                call(model, X)
    with pytest.raises(ValueError, match="cannot follow torch.inference_mode"):
        admin.attach(Stack(Layer).double(), x)
