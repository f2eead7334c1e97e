"""Models as users write them: a feed-forward inside forward, positions added before q and k, adapters, wrappers."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from post_ln import perturbed
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import fairseq_admin.pytorch as admin

C = 16
X = torch.randn(4, 10, C, generator=torch.Generator().manual_seed(0)).double()


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


class Convolution(Layer):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Conv1d(C, 2 * C, 1), nn.Conv1d(2 * C, C, 1)

    def branch(self, h):
        return self.down(torch.relu(self.up(h.transpose(1, 2)))).transpose(1, 2)


class Flattened(Layer):
    def branch(self, h):
        return super().branch(h.reshape(-1, C)).view_as(h)


class FunctionalDropout(Layer):
    def branch(self, h):
        return super().branch(functional.dropout(h, 0.1, self.training))


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
        self.places = nn.Parameter(torch.randn(10, C))

    def attend(self, h):
        return self.attn(h + self.places, h + self.places, h, need_weights=False)[0]


class Stack(nn.Module):
    def __init__(self, layer=Layer, layers=6):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.layers = nn.LayerNorm(C), nn.ModuleList(layer() for _ in range(layers))

    def forward(self, h):
        h = self.first(h)
        for layer in self.layers:
            h = layer(h)
        return h


NAMES = [f"layers.{i}.{norm}" for i in range(6) for norm in "ab"]


@pytest.mark.parametrize("layer", [Convolution, Flattened, FunctionalDropout, ThreeWeights])
def test_a_branch_inside_forward_is_a_site(layer):
    model = admin.attach(Stack(layer).double(), X)
    assert list(admin.omegas(model)) == NAMES
    assert all(omega.eq(12**0.5).all() for omega in admin.omegas(model).values())
    perturbed(model).eval()
    before = model(X)
    admin.fold(model, X)
    assert (model(X) - before).abs().max() < 1e-12


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("layer", [Layer, Convolution])
def test_layers_in_checkpoints_have_the_same_gradients(layer, reentrant):
    gradients = []
    for saving in (False, True):
        model = perturbed(admin.attach(Stack(layer).double(), X))
        h = model.first(X.clone().requires_grad_())
        for each in model.layers:
            h = checkpoint(each, h, use_reentrant=reentrant) if saving else each(h)
        h.square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        assert not saving or len([key for key, _ in model.named_parameters() if "omega" in key]) == 12
    for plain, saved in zip(*gradients):
        torch.testing.assert_close(plain, saved, rtol=1e-9, atol=1e-12)


def test_layers_compiled_one_by_one_take_one_graph_more():
    graphs = []
    for attached in (False, True):
        torch._dynamo.reset()
        model, counter = Stack(layers=24).eval(), CompileCounter()
        if attached:
            perturbed(admin.attach(model, X.float()))
        plain = model(X.float())
        for layer in model.layers:
            layer.compile(backend=counter, fullgraph=True)
        torch.testing.assert_close(model(X.float()), plain)
        graphs.append(counter.frame_count)
    assert graphs[1] <= graphs[0] + 1


def test_positions_before_q_and_k_are_refused_kept_or_skipped(caplog):
    model = Stack(Positions).double()
    with pytest.raises(
        ValueError, match=r"layers\.0\.a has a shortcut that .* add in layers\.\d \(.*\.py:\d+\); unfold"
    ):
        admin.attach(model, X)
    kept = admin.attach(copy.deepcopy(model), X, unfoldable="keep")
    assert "Admin: Stack cannot be folded: layers.0.a has a shortcut" in caplog.text
    assert list(admin.omegas(kept)) == NAMES and admin.omegas(kept)["layers.3.a"].eq(12**0.5).all()
    optimizer = torch.optim.AdamW(kept.parameters(), 1e-2)
    kept(X).square().sum().backward()
    optimizer.step()
    assert all(omega.std() > 0 for omega in admin.omegas(kept).values())
    with pytest.raises(ValueError, match=r"^Stack cannot be folded: layers\.0\.a has .* Keep it with its omega\.$"):
        admin.fold(kept, X)
    assert len(admin.omegas(kept)) == 12
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
    model = admin.attach(Stack(Rows, 3).double(), X)
    (stack,) = model._admin.stacks
    assert len(stack) == 12 and all(omega.eq(12**0.5).all() for omega in admin.omegas(model).values())


class Alone(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.fc, self.norm = nn.LayerNorm(C), nn.Linear(C, C), nn.LayerNorm(C)

    def forward(self, h):
        h = self.first(h)
        return self.norm(h + self.fc(h))


def test_what_is_attached_and_what_is_off_is_said(caplog):
    with caplog.at_level(logging.INFO, "fairseq_admin"):
        admin.attach(Alone(), X.float())
    assert "attached to 1 sites, omega='constant': stack of norm 1 sub-layers, omega 1.000 to 1.000" in caplog.text
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["Admin is off: norm is alone in its stack, so omega is 1"]


class Own(nn.Module):
    def __init__(self, norm, scale=1.0):
        super().__init__()
        self.first, self.fc, self.norm, self.scale = nn.LayerNorm(C), nn.Linear(C, C), norm, scale

    def forward(self, h):
        h = self.first(h)
        return self.norm(self.scale * h + self.fc(h))


class LN(nn.LayerNorm):
    pass


class Function(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Linear(C, 1)

    def forward(self, h):
        return functional.layer_norm(h, (C,), self.gain.weight[0])


WEIGHTLESS = "calls layer_norm without a weight of its own for each channel"


@pytest.mark.parametrize(
    "model, reason",
    [
        (lambda: Own(nn.LayerNorm(C), 1.5), "reads a sum with a factor at the shortcut, as DeepNorm's"),
        (lambda: Own(nn.LayerNorm(C, elementwise_affine=False)), WEIGHTLESS),
        (lambda: Own(Function()), WEIGHTLESS),
    ],
)
def test_what_was_not_taken_for_a_norm_is_said(model, reason, caplog):
    with pytest.raises(ValueError, match=rf"no site, .*norm {reason}\. Admin is for Post-LN\.$"):
        admin.attach(model(), X.float())
    both = nn.Sequential(Stack(layers=1), model())
    admin.attach(both, X.float())
    assert f"Admin is off: 1.norm {reason}" in caplog.text


def test_a_norm_is_known_by_its_weights_not_by_its_name():
    assert list(admin.omegas(admin.attach(Own(LN(C)), X.float()))) == ["norm"]


class Every(Stack):
    """Also returns every layer's output."""

    def forward(self, h):
        every = [self.first(h)]
        for layer in self.layers:
            every.append(layer(every[-1]))
        return every[-1], every


def test_streams_that_a_model_returns_are_not_compared():
    model = perturbed(admin.attach(Every().double(), X)).eval()
    before = model(X)[0]
    assert (admin.fold(model, X)(X)[0] - before).abs().max() < 1e-12
    wrong = admin.attach(Every().double(), X)
    wrong.layers[1].register_forward_pre_hook(lambda layer, args: (args[0] + 0.1,))
    with pytest.raises(ValueError, match="the folded model is off by"):
        admin.fold(wrong, X)


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
    model = nn.Sequential(Merged(C, C), Every()).double()
    nn.init.constant_(model[0].weight, 0.5)  # exact in binary, so merging does not round
    admin.attach(model, X)
    assert model.training and not model[0].merged and model[0].weight.eq(0.5).all()
    model[1].layers[1].register_forward_pre_hook(lambda layer, args: (args[0] + 0.1,))
    with pytest.raises(ValueError, match="the folded model is off by"):
        admin.fold(model, X)
    assert model.training and not model[0].merged and model[0].weight.eq(0.5).all()


class Cloned(Layer):
    """Passes x itself to no module."""

    def attend(self, h):
        return super().attend(h.clone())


class ByKeyword(Stack):
    def forward(self, h):
        h = self.first(h)
        for layer in self.layers:
            h = layer(h=h) if self.training else layer(h)
        return h


def test_a_layer_called_by_keyword_in_training():
    model = perturbed(admin.attach(ByKeyword(Cloned).double(), X))
    trained = model.train()(X)
    torch.testing.assert_close(trained, model.eval()(X), rtol=0, atol=1e-12)


@pytest.mark.parametrize("whole", [True, False])
def test_what_was_compiled_before_attach_is_compiled_again(whole):
    model = Stack(layers=2).eval()
    compiled = torch.compile(model if whole else lambda x: model(x), backend="eager")
    x = X.float()
    stock = compiled(x)
    admin.attach(model, x)
    assert (compiled(x) - stock).abs().max() > 1e-3
    torch.testing.assert_close(compiled(x), model(x))
    admin.fold(model)
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("late", [True, False])
def test_an_optimizer_made_before_attach_is_said(late, caplog):
    model, x = Stack(layers=2), X.float()
    stranger = nn.Linear(2, 2)
    early = torch.optim.AdamW(model.parameters())
    admin.attach(model, x)
    optimizers = [torch.optim.SGD(stranger.parameters()), torch.optim.AdamW(model.parameters()) if late else early]
    for _ in range(2):
        model(x).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert caplog.text.count("this optimizer does not move omega: it was made before attach") == (not late)


def low_rank(model):
    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.low = base, nn.Linear(C, 2 * C)

    model.layers[1].up = Adapter(model.layers[1].up)


CHANGES = {
    "LoRA": low_rank,
    "weight_norm": lambda model: parametrizations.weight_norm(model.layers[1].up),
    "pruning": lambda model: prune.l1_unstructured(model.layers[1].up, "weight", 0.3),
    "tying": lambda model: setattr(model.layers[1].up, "weight", model.layers[2].up.weight),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_put_on_after_attach_is_named_by_the_fold(change):
    model = admin.attach(Stack().double(), X)
    CHANGES[change](model)
    for batch in (None, X):
        with pytest.raises(ValueError, match=r"^layers\.[12]\.up\S* has changed since attach: "):
            admin.fold(model, batch)


@pytest.mark.parametrize(
    "change, kind",
    [
        (parametrizations.weight_norm, "_WeightNorm"),
        (parametrizations.spectral_norm, "_SpectralNorm"),
        (lambda module: prune.l1_unstructured(module, "weight", 0.3), "L1Unstructured"),
    ],
)
def test_what_was_put_on_before_attach_is_named(change, kind):
    model = Stack().double()
    change(model.layers[1].up)
    with pytest.raises(ValueError, match=rf"layers\.1\.b .* linear in layers\.1\.up, whose weight is under {kind}"):
        admin.attach(model, X)


def test_meta_and_inference_mode_are_refused_in_one_line():
    with torch.device("meta"):
        model = Stack(layers=1)
    with pytest.raises(ValueError, match="cannot follow torch.inference_mode or the meta device"):
        admin.attach(model, torch.ones(4, 10, C, device="meta"))
    with torch.inference_mode():
        x = X.clone()
        with pytest.raises(ValueError, match="cannot follow torch.inference_mode"):
            admin.attach(Stack(layers=1).double(), X)
    with pytest.raises(ValueError, match="cannot follow torch.inference_mode"):
        admin.attach(Stack(layers=1).double(), x)
