"""What attach and fold say and refuse: models without a sub-layer, branches that do not fold, arguments, the log."""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import make_dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from grammar import Kind, check
from post_ln import SITES, WRITERS, C, Layer, Stack, X, apart, layer, outputs, with_omega
from torch import nn

import fairseq_admin.pytorch as admin

NORMS = "layers.0.a, like layers.1.a and layers.2.a,"
NO_SHORTCUT = "out reads a sum whose shortcut no norm wrote"
FACTOR = f"{NORMS} reads a sum with a factor at the shortcut, as DeepNorm's"
NO_SUBLAYER = {
    "Pre-LN": (
        lambda s, x: x + s.feed(s.a(x)),
        f"layers.1.a, like layers.2.a, reads a sum that goes on, as in Pre-LN; {NO_SHORTCUT}",
    ),
    "two sub-layers before a norm, as in Conformer": (
        lambda s, x: s.a((y := x + s.attend(x)) + s.feed(y)),
        f"{NORMS} reads a sum whose shortcut no norm wrote",
    ),
    "a norm before the sum, as in Swin v2": (lambda s, x: x + s.a(s.feed(x)), NO_SHORTCUT),
    "DeepNorm": (lambda s, x: s.a(1.5 * x + s.feed(x)), FACTOR),
    "two factors, as in TFT": (lambda s, x: s.a(1.5 * x * 2.0 + s.feed(x)), FACTOR),
    "numpy": (
        lambda s, x: s.a(x + torch.from_numpy(s.feed(x).detach().numpy())),
        f"{NORMS} reads a sum of which no term depends on the other",
    ),
    "no sum": (lambda s, x: s.a(s.feed(x)), "It has no norm that reads a sum"),
}


@pytest.mark.parametrize("case", NO_SUBLAYER)
def test_a_model_without_a_sublayer_is_refused_with_the_reason(case):
    forward, reason = NO_SUBLAYER[case]
    model = Stack(layer(forward))
    model.out = nn.LayerNorm(C).double()
    with pytest.raises(ValueError) as error:
        admin.attach(model, X)
    reasons = f"no sum x + f(x) that only a norm reads. {reason}. Admin is for Post-LN."
    assert str(error.value) == f"Stack: {reasons}"


def tanh(s, x):
    return s.down(s.up(x)).tanh()


def mixed(change=None, parts=()):
    """A stack whose second layer has a feed-forward that is not proportional to weights."""
    model = Stack()
    model.layers[1] = layer(feed=change or (lambda s, x: s.act(s.down(s.up(x)))), parts=parts or {"act": nn.GELU})()
    return model.double()


def test_what_does_not_fold_is_refused_kept_or_skipped(caplog):
    model = mixed()
    keys, stock = list(model.state_dict()), outputs(model, X)
    why = (
        r"layers\.1\.b has a branch that is not proportional to weights: gelu in layers\.1\.act, a GELU \(\w+\.py:\d+\)"
    )
    for _ in range(2):
        with pytest.raises(ValueError, match=rf'^Stack: {why}\. unfoldable="keep" trains .* unfoldable="skip" gives'):
            admin.attach(model, X)
        assert list(model.state_dict()) == keys and apart(outputs(model, X), stock) == 0 and model.training
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    kept = admin.attach(copy.deepcopy(model), X, unfoldable="keep")
    assert "Admin: Stack cannot be folded: layers.1.act has a branch that is not proportional" in caplog.text
    assert list(admin.omegas(kept)) == [*WRITERS[:3], "layers.1.act", *WRITERS[4:]]
    for call in (admin.fold, admin.folded_state_dict):
        with pytest.raises(ValueError, match=r"^Stack cannot be folded: layers\.1\.act .*\. Keep it with its omega\.$"):
            call(kept)
    caplog.clear()
    skipped = admin.attach(model, X, unfoldable="skip")
    assert [record.message.partition(" has")[0] for record in caplog.records[-1:]] == ["Admin is off: layers.1.b"]
    assert skipped._admin.norms == SITES[:3] + SITES[4:] and list(skipped._admin.stacks.values()) == [5]
    before = outputs(with_omega(skipped), X)
    assert apart(outputs(admin.fold(skipped, X), X), before) < 1e-12


def test_a_branch_that_no_module_returns_can_only_be_skipped():
    model = mixed(tanh)
    for unfoldable in ("refuse", "keep"):
        with pytest.raises(ValueError, match=r", and no module returns it\. unfoldable=\"skip\" gives them none\.$"):
            admin.attach(model, X, unfoldable=unfoldable)
    assert len(admin.omegas(admin.attach(model, X, unfoldable="skip"))) == 5
    everywhere = Stack(layer(lambda s, x: s.a(x + s.down(s.up(x)).tanh())))
    with pytest.raises(
        ValueError, match=r"^Stack: no sum .* layers\.0\.a, like .* and no module returns it\. Admin is"
    ):
        admin.attach(everywhere, X, unfoldable="skip")


def test_an_expert_without_a_token_is_named():
    results = {check([Kind(branch="experts")], seed=seed) for seed in range(6)}
    reasons = results - {"folded"}
    assert reasons < results and all("where this batch does not run layers.0.part.experts." in why for why in reasons)


class Twice(Stack):
    """A second stack of one layer. `share` makes it share with the first."""

    def __init__(self, share):
        super().__init__()
        self.second, self.other = nn.LayerNorm(C), Layer()
        share(self)
        self.double()

    def forward(self, x):
        return super().forward(x) + self.other(self.second(x.flip(0)))


def tie(model):
    model.other.down.weight, model.other.down.bias = model.layers[0].down.weight, model.layers[0].down.bias


def test_a_layer_of_two_stacks_has_the_omega_of_the_deeper_one(caplog):
    caplog.set_level(logging.INFO, "fairseq_admin")
    model = Twice(lambda model: setattr(model, "other", model.layers[0]))
    admin.attach(model, X)
    assert all(omega == 6**0.5 for omega in admin.omegas(model).values())
    assert "stack of layers.0.a: 6 sub-layers, omega 2.449" in caplog.text
    before = outputs(model, X)
    assert apart(outputs(admin.fold(model, X), X), before) < 1e-12


def test_weights_that_are_tied_across_stacks_have_one_omega():
    with pytest.raises(
        ValueError, match=r"^layers\.0\.down\.\w+ writes branches with two omega\. Give attach a number"
    ):
        admin.attach(Twice(tie), X)
    model, stock = Twice(tie), Twice(tie)
    before = outputs(admin.attach(model, X, omega=3), X)
    with torch.no_grad():
        for linear in (part for part in stock.modules() if isinstance(part, (nn.MultiheadAttention, nn.Linear))):
            if (linear is not stock.out) and getattr(linear, "in_features", 0) != C:  # out_proj, down
                writer = getattr(linear, "out_proj", linear)
                if writer is not stock.other.down:  # it is tied
                    writer.weight /= 3
                    writer.bias /= 3
    assert apart(outputs(stock, X), before) < 1e-12
    assert apart(outputs(admin.fold(model, X), X), before) < 1e-12


def test_a_writer_that_something_else_reads_is_refused():
    model = Stack()
    model.out.weight = model.layers[2].attn.out_proj.weight
    with pytest.raises(
        ValueError, match=r"^Stack: layers\.2\.a has a branch made of out\.weight, which is also read by"
    ):
        admin.attach(model, X)
    model = Stack(layer(feed=lambda s, x: x.tanh() @ s.w, parts={"w": lambda: nn.Parameter(torch.randn(C, C))}))
    model.layers[1].w = model.layers[0].w
    with pytest.raises(ValueError, match=r"made of layers\.0\.w and layers\.1\.w, which are one weight, and no"):
        admin.attach(model, X)


def test_packed_weights_are_refused():
    model = torch.ao.quantization.quantize_dynamic(Stack().float(), {nn.Linear})
    with pytest.raises(ValueError, match=r"not proportional to weights: linear_dynamic in layers\.0\.down, a Linear"):
        admin.attach(model, X.float())


def test_the_log_says_what_is_attached_and_what_is_off(caplog):
    model = mixed(tanh)
    model.of_another_task = nn.LayerNorm(C)
    model.layers[2] = layer(lambda s, x: s.a(1.5 * x + s.attend(x)))().double()
    with caplog.at_level(logging.INFO, "fairseq_admin"):
        admin.attach(model, X, unfoldable="skip")
    attached, off = [record.message for record in caplog.records]
    assert attached == "Admin: attached, omega='constant': stack of layers.0.a: 3 sub-layers, omega 1.732"
    reasons = ["layers.2.a reads a sum with a factor at the shortcut, as DeepNorm's", "layers.1.b has a branch that is"]
    assert off.startswith(f"Admin is off: {reasons[0]}; {reasons[1]}")
    assert off.endswith("; layers.2.b, like of_another_task, does not run on this batch")


@pytest.mark.parametrize("omega, said", [("constant", True), (3, False)])
def test_a_stack_of_one_sublayer_is_said(omega, said, caplog):
    model = Stack(layer(lambda s, x: s.a(x + s.attend(x))))
    del model.layers[1:]
    admin.attach(model, X, omega=omega)
    assert ("layers.0.a is alone in its stack, so its omega is about 1" in caplog.text) is said


def test_what_cannot_be_attached_or_folded():
    model = Stack()
    for call in (admin.fold, admin.omegas, admin.folded_state_dict):
        with pytest.raises(ValueError, match="Stack is not attached"):
            call(model)
    for options in ({"omega": "logn"}, {"omega": 0}, {"omega": math.nan}, {"unfoldable": "no"}):
        (name,) = options
        with pytest.raises(ValueError, match=rf"^{name}=\S+; expected "):
            admin.attach(model, X, **options)
    compiled = copy.deepcopy(model)
    compiled.layers[1].compile()
    for wrong, name in ((torch.compile(model), "OptimizedModule"), (compiled, "Kind|Layer")):
        with pytest.raises(ValueError, match=f"^({name}) is compiled, wrapped or sharded; attach to the model before"):
            admin.attach(wrong, X)
    admin.attach(model, X, omega=1)
    for part in (model, model.layers[1]):
        with pytest.raises(ValueError, match="attached already"):
            admin.attach(part, X)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, X))
    with pytest.raises(ValueError, match="a DataLoader is not a batch; give one batch"):
        admin.attach(Stack(), loader)


def test_meta_inference_mode_and_vmap_are_refused_in_one_line():
    with torch.device("meta"):
        model = Stack()
    with pytest.raises(ValueError, match="cannot follow torch.inference_mode or the meta device"):
        admin.attach(model, torch.ones(2, 5, C, device="meta"))
    attached = admin.attach(Stack(), X)
    with torch.inference_mode():
        x = X.clone()
        for call, model in ((admin.attach, Stack()), (admin.fold, attached)):
            with pytest.raises(ValueError, match="cannot follow torch.inference_mode"):
                call(model, X)
    with pytest.raises(ValueError, match="cannot follow torch.inference_mode"):
        admin.attach(Stack(), x)
    mapped = Stack()
    mapped.forward = lambda x: torch.vmap(lambda y: Stack.forward(mapped, y))(x)
    with pytest.raises(ValueError, match="cannot follow torch.vmap"):
        admin.attach(mapped, X)


@pytest.mark.parametrize("shape", [(C,), (1, 1, C)])
def test_a_trained_model_is_given_no_other_omega(shape):
    norm = {"a": lambda: nn.LayerNorm(C), "g": lambda: nn.Parameter(torch.ones(shape))}
    model = Stack(layer(lambda s, x: s.a(x + s.attend(x)) * s.g, parts=norm))
    model.layers[2].a.weight.data[3] += 1e-3
    with pytest.raises(ValueError, match=r"^layers\.2\.a differs between channels: the model has been trained"):
        admin.attach(model, X)
    assert len(admin.omegas(admin.attach(model, X, omega=1))) == 3


def test_two_models_in_one_are_told_apart():
    model = nn.ModuleDict({name: admin.attach(Stack(), X) for name in "ab"})
    with pytest.raises(ValueError, match="ModuleDict holds 2 attached models; give one of them"):
        admin.omegas(model)
    assert admin.fold(model["a"], X) and len(admin.omegas(model)) == 6


class Extra(nn.Module):
    def get_extra_state(self):
        return {"count": 3}


def test_a_state_dict_of_more_or_less_than_weights():
    """The fold keeps get_extra_state's value, and also changes weights that the state dict lacks."""
    model = with_omega(admin.attach(Stack(layer(parts={"extra": Extra})), X))
    assert admin.folded_state_dict(model)["layers.0.extra._extra_state"] == {"count": 3}
    model.state_dict = lambda **options: {}
    before = outputs(model, X)
    assert apart(outputs(admin.fold(model), X), before) < 1e-12


class Halves(Stack):
    """Computes in bfloat16 and returns float32, as under a Trainer with bf16=True."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x.float()).float()


Outputs = make_dataclass("Outputs", ["loss", "logits"])


def with_a_loss_and_masked_outputs():
    """A model that returns a loss of 0, and twice the outputs in which a mask has put huge numbers."""

    def loss_and_outputs(model, args, output):
        masked = output.masked_fill(X > 1, -math.inf).masked_fill(X < -1, torch.finfo(X.dtype).min)
        return Outputs(output.new_zeros(()), (masked, F.dropout(masked, 0.0, model.training)))

    model = Stack()
    model.register_forward_hook(loss_and_outputs)
    return model


@pytest.mark.parametrize("make, shift", [(with_a_loss_and_masked_outputs, 0.1), (lambda: Halves().float(), 3.0)])
def test_a_fold_is_compared_and_refused_if_it_is_not_the_same(make, shift):
    model = with_omega(admin.attach(make(), X))
    admin.fold(copy.deepcopy(model), X)
    model.layers[1].register_forward_pre_hook(lambda layer, args: (args[0] + shift * ("_admin" in vars(model)),))
    before, omega = outputs(model, X), admin.omegas(model)
    with pytest.raises(ValueError, match="the folded model is off by"):
        admin.fold(model, X)
    assert before and all(map(torch.equal, before, outputs(model, X))) and admin.omegas(model) == omega


def test_a_fold_that_cannot_be_compared_is_refused():
    model = admin.attach(Stack(), X)
    model.register_forward_hook(lambda model, args, output: SimpleNamespace(logits=output))
    with pytest.raises(
        ValueError, match=r"^Stack: the fold cannot be compared \(no floats in a SimpleNamespace\)\. Call"
    ):
        admin.fold(model, X)
    assert len(admin.omegas(model)) == 6
    admin.fold(model)


def test_a_model_in_half_precision_is_followed():
    """The trace follows half-precision models, where numbers near 0 have few bits, as some random values here do."""
    for seed in range(4):
        torch.manual_seed(seed)
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 4, 256, batch_first=True), 1).half()
        admin.attach(model, torch.randn(4, 64, 512).half())
        assert len(admin.omegas(model)) == 2
