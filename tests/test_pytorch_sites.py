"""Which norms are sites: small layers, each written for one rule, and error messages."""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import make_dataclass
from types import SimpleNamespace

import pytest
import torch
from post_ln import ChannelsFirst, Stack, X, output, perturbed
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fairseq_admin.pytorch as admin
from fairseq_admin.pytorch.channel_flow import tensors


class Layer(nn.Module):
    """One Post-LN sub-layer. Tests override its method `read`, which reads the shortcut, and add modules by name."""

    others = {}

    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        for name, make in self.others.items():
            setattr(self, name, make())

    def read(self, x):
        return self.fc1(x)

    def forward(self, x):
        return self.norm(x + self.fc2(self.read(x).tanh()))


def kind(read=Layer.read, forward=Layer.forward, **others):
    """A layer class with these methods and extra modules."""
    return type("Kind", (Layer,), {"read": read, "forward": forward, "others": others})


def after_the_sum(self, x):
    """A layer's forward. It writes the shortcut itself, and another module reads the shortcut once more at the end."""
    shortcut = self.first(x)
    result = Layer.forward(self, shortcut)
    self.other(shortcut)
    return result


def parameter(*shape):
    return lambda: nn.Parameter(torch.randn(*shape) / 3)


class OddNorm(nn.Module):
    """Has a norm's name, but takes indices, or returns two tensors."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return (x * self.weight, x) if x.is_floating_point() else self.weight[x]


class Repeated(Layer):
    """The shortcut is learned queries, the same for every sentence."""

    others = {"other": lambda: nn.LayerNorm(8), "queries": parameter(1, 5, 8)}

    def forward(self, x):
        queries = self.other(self.queries)
        return self.norm(queries + (x + self.fc1(queries)))


class Positions(Stack):
    """A norm before the layers reads a sum with a positional convolution, as in wav2vec 2.0: it is no site."""

    def __init__(self, layer):
        super().__init__(layer)
        self.conv, self.after = nn.Conv1d(8, 8, 3, padding=1), nn.LayerNorm(8)

    def forward(self, x):
        return super().forward(self.after(x + self.conv(x.transpose(1, 2)).transpose(1, 2)))


class FromNumpy(Stack):
    """Its input comes from numpy, which the trace cannot see."""

    def forward(self, x):
        return super().forward(torch.from_numpy(x.numpy()))


class LN(nn.Module):
    """A custom norm. Its parameters have other names than torch's, and its weight is a function of one of them."""

    def __init__(self, begin, weight, shape=(8,)):
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.full(shape, begin)), nn.Parameter(torch.zeros(shape))
        self.inner, self.weight = nn.LayerNorm(8, elementwise_affine=False), weight

    def forward(self, x):
        return self.weight(self.gamma) * self.inner(x) + self.beta


STACKS = {
    "a positional convolution": Positions,
    "from numpy": FromNumpy,
    "unseen": FromNumpy,
}
FOLDED = {
    "repeated": Repeated,
    "channels first": ChannelsFirst,
    "a positional convolution": Layer,
    "from numpy": Layer,
    "a custom norm": kind(norm=lambda: LN(1.0, lambda weight: weight)),
    "a weight that starts at 0": kind(norm=lambda: LN(0.0, lambda weight: 1 + weight)),
    "odd norms": kind(lambda self, x: self.fc1(x) + self.odd(X)[0] + self.odd(torch.arange(8)), odd=OddNorm),
    "flat, as in OPT": kind(forward=lambda self, x: self.norm((x.reshape(-1, 8) + self.fc1(x.view(-1, 8))).view_as(x))),
    "after the sum": kind(forward=after_the_sum, first=lambda: nn.LayerNorm(8), other=lambda: nn.Linear(8, 8)),
    "a factor of 1": kind(forward=lambda self, x: self.norm(self.fc2(self.fc1(x)) + 1.0 * x)),
    "twice": kind(lambda self, x: self.fc1(x) * self.fc1(x)),
    "dropout, cast": kind(lambda self, x: self.fc1(functional.dropout(x.type_as(self.fc1.bias), 0.1, False))),
    "a part": kind(lambda self, x: self.fc1(x[:, :1]).expand_as(x)),
    "mask": kind(lambda self, x: self.fc1(x * torch.ones(2, 5, 1).double())),
    "addmm": kind(lambda self, x: self.b.addmm(x.view(-1, 8), self.w).view(x.shape), b=parameter(8), w=parameter(8, 8)),
    "of two positions": kind(lambda self, x: self.fc1(x + x.roll(1, 1))),
    "gate": kind(lambda self, x: self.fc1(x * self.gate(x).sigmoid()), gate=lambda: nn.Linear(8, 8)),
    "depthwise": kind(
        lambda self, x: self.fc1(self.conv(x.transpose(1, 2)).transpose(1, 2)),
        conv=lambda: nn.Conv1d(8, 8, 3, padding=1, groups=8, bias=False),
    ),
    "a factor of the branch": kind(forward=lambda self, x: self.norm(torch.add(x, self.fc1(x).tanh(), alpha=0.5))),
    "a branch that is subtracted, as in ETSformer": kind(forward=lambda self, x: self.norm(x - self.fc1(x).tanh())),
    "an identity": kind(forward=lambda self, x: self.norm(self.skip(x) + self.fc1(x).tanh()), skip=nn.Identity),
    "a table that is no buffer": kind(lambda self, x: self.fc1(x) * self.table[0], table=lambda: (X[0],)),
    "shapes": kind(lambda self, x: self.fc1(x) + torch.zeros_like(x) + x.new_ones(x.shape)),
    "an empty tensor": kind(lambda self, x: torch.empty_like(x).copy_(self.fc1(x))),
    "noise in evaluation": kind(lambda self, x: self.fc1(x) + torch.randn_like(x)),
    "a branch that is kept": kind(lambda self, x: setattr(self, "kept", self.fc1(x)) or self.kept),
    "a sum that starts at 0": kind(forward=lambda self, x: self.norm(sum([x, self.fc1(x).tanh()]))),
    "a number without axes": kind(lambda self, x: self.fc1(x) * x.new_ones(()).permute(())),
    "two branches": kind(
        forward=lambda self, x: self.norm(x + self.fc2(self.fc1(x).tanh()) + self.adapter(x)),
        adapter=lambda: nn.Linear(8, 8),
    ),
    "axes moved after the sum, as in PatchTST": kind(
        forward=lambda self, x: self.norm((x + self.fc1(x).tanh()).transpose(1, 2)).transpose(1, 2),
        norm=lambda: nn.BatchNorm1d(8),
    ),
    "a norm's parameters with axes of 1": kind(norm=lambda: LN(1.0, lambda weight: weight, (1, 1, 8))),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLDED)
def test_what_reads_a_shortcut_is_folded(case):
    model = STACKS.get(case, Stack)(FOLDED[case]).double()
    for norm in [layer.norm for layer in model.layers]:
        for parameter in norm.parameters():
            parameter.data += torch.rand_like(parameter)
    stock = output(model, {"x": X})
    admin.attach(model, X, omega=1)
    assert list(admin.omegas(model)) == [f"layers.{i}.norm" for i in range(3)]
    assert torch.equal(output(model, {"x": X}), stock)
    before = output(perturbed(model), {"x": X})
    admin.fold(model, X)
    assert (output(model, {"x": X}) - before).abs().max() < 1e-12 < 1e-3 < (before - stock).abs().max()


class InPlace(Layer):
    def forward(self, x):
        x += self.fc2(self.fc1(x).tanh())
        return self.norm(x)


REFUSED = {
    "in place": (InPlace, r"layers\.0\.norm reads a sum that is written over its shortcut"),
    "positions": (
        kind(lambda self, x: self.fc1(x + self.p), p=lambda: nn.Parameter(torch.zeros(8))),
        r"by add in layers\.\d, a Kind \(\w+\.py:\d+\)",
    ),
    "weight": (kind(lambda self, x: functional.linear(x, 2 * self.fc1.weight)), "also read by linear"),
    "before": (kind(lambda self, x: self.fc1(self.other(x)), other=lambda: nn.LayerNorm(8)), "also read by norm"),
    "itself": (kind(lambda self, x: self.fc1(x) * x), "also read by tanh"),
    "a bound": (kind(lambda self, x: self.fc1(x.clamp(-99, 99))), "also read by clamp"),
    "fft": (kind(lambda self, x: self.fc1(x) + torch.fft.fft(x).real), "also read by fft_fft"),
    "groups": (
        kind(lambda self, x: self.conv(x.transpose(1, 2)).transpose(1, 2), conv=lambda: nn.Conv1d(8, 8, 1, groups=2)),
        r"layers\.0\.norm has a shortcut that is also read by conv1d in layers\.0\.conv",
    ),
    "heads": (kind(lambda self, x: self.w(x.view(2, 5, 2, 4)).view(x.shape), w=lambda: nn.Linear(4, 4)), "by view"),
    "shared": (kind(lambda self, x: self.fc1(x) + self.fc1(torch.ones_like(x))), "into layers.0.fc1.weight, which is"),
    "unseen": (
        kind(lambda self, x: torch.from_numpy(self.fc1(x).detach().numpy())),
        r"layers\.0\.norm reads what the trace cannot see",
    ),
    "norm": (kind(lambda self, x: self.fc1(self.norm(x))), r"layers\.0\.norm is called 2 times"),
    "an expert without a token": (
        kind(lambda self, x: self.fc1(x) + self.expert(x[x > 999].view(-1, 8)).sum(), expert=lambda: nn.Linear(8, 8)),
        "__getitem__",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_folded_is_refused_and_leaves_the_model_as_it_was(case):
    layer, message = REFUSED[case]
    model = STACKS.get(case, Stack)(layer).double()
    keys, stock = list(model.state_dict()), model(X)
    with pytest.raises(ValueError, match=message):
        admin.attach(model, X)
    assert list(model.state_dict()) == keys and torch.equal(model(X), stock)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert model.training


def test_another_call_of_the_norm_is_no_source_of_its_shortcut(caplog):
    model = admin.attach(Stack(REFUSED["norm"][0]).double(), X, unfoldable="keep")
    assert "Admin is off: layers.0.norm is called 2 times" in caplog.text
    assert list(admin.omegas(model)) == ["layers.1.norm", "layers.2.norm"]


def test_a_model_whose_sites_are_all_skipped_is_refused():
    with pytest.raises(ValueError, match=r"^Stack: no site, .* layers\.0\.norm .* also read by conv1d"):
        admin.attach(Stack(REFUSED["groups"][0]).double(), X, unfoldable="skip")


NORMS = "layers.0.norm, like layers.1.norm and layers.2.norm,"
FACTOR = f"{NORMS} reads a sum with a factor at the shortcut, as DeepNorm's"
WEIGHTLESS = r"calls layer_norm, but not as norm\(x\), a module with weights"
NO_SHORTCUT = "out reads a sum whose shortcut no norm wrote"
NO_SITE = {
    "Pre-LN": (
        kind(forward=lambda self, x: x + self.fc1(self.norm(x))),
        f"layers.1.norm, like layers.2.norm, reads a sum that goes on, as in Pre-LN; {NO_SHORTCUT}",
    ),
    "two sub-layers before a norm, as in Conformer": (
        kind(forward=lambda self, x: self.norm((y := x + self.fc1(x)) + self.fc2(y))),
        f"{NORMS} reads a sum whose shortcut no norm wrote",
    ),
    "a norm before the sum, as in Swin v2": (kind(forward=lambda self, x: x + self.norm(self.fc1(x))), NO_SHORTCUT),
    "DeepNorm": (kind(forward=lambda self, x: self.norm(1.5 * x + self.fc1(x))), FACTOR),
    "two factors, as in TFT": (kind(forward=lambda self, x: self.norm(1.5 * x * 2.0 + self.fc1(x))), FACTOR),
    "DeepNorm, the branch first": (kind(forward=lambda self, x: self.norm(self.fc1(x) + 1.5 * x)), FACTOR),
    "a shortcut that only training changes": (
        kind(forward=lambda self, x: self.norm(self.locked(x) + self.fc1(x)), locked=lambda: Locked()),
        f"{NORMS} reads a sum of which no term depends on the other",
    ),
    "alpha": (kind(forward=lambda self, x: self.norm(torch.add(self.fc1(x), x, alpha=2.0))), FACTOR),
    "the shortcut subtracted": (kind(forward=lambda self, x: self.norm(self.fc1(x) - x)), FACTOR),
    "dropout after the sum": (
        kind(forward=lambda self, x: self.norm(functional.dropout(x + self.fc1(x), 0.1, self.training))),
        f"{NORMS} reads dropout of a sum, not the sum",
    ),
    "the shortcut twice": (kind(forward=lambda self, x: self.norm(x + self.fc1(x) + x)), FACTOR),
    "scripted": (
        lambda: torch.jit.script(nn.Linear(8, 8)),
        "layers.0, like layers.1 and layers.2, is scripted, so attach cannot see into it",
    ),
    "a function": (
        kind(forward=lambda self, x: functional.layer_norm(x + self.fc1(x), (8,), self.fc1.bias)),
        f"layers.0, like layers.1 and layers.2, {WEIGHTLESS}",
    ),
    "no factor can be written": (
        kind(norm=lambda: LN(0.0, torch.exp)),
        f"layers.0.norm.inner, .* {WEIGHTLESS}; out reads a sum of which no term depends on the other",
    ),
}


@pytest.mark.parametrize("case", NO_SITE)
def test_a_model_without_a_site_is_refused_with_the_reason(case):
    layer, reason = NO_SITE[case]
    model = Stack(layer).double()
    model.out = nn.LayerNorm(8).double()
    with pytest.raises(ValueError, match=rf"no site, .* x \+ f\(x\)\. {reason}\. Admin is for Post-LN\.$"):
        admin.attach(model, X)


def test_the_log_says_what_is_attached_and_what_is_off(caplog):
    model = Stack(Layer).double()
    model.layers[1].norm = model.layers[2].norm = nn.LayerNorm(8, elementwise_affine=False)
    model.of_another_task = nn.LayerNorm(8)
    with caplog.at_level(logging.INFO, "fairseq_admin"):
        admin.attach(model, X)
    attached, off = [record.message for record in caplog.records]
    assert "to 1 site, omega='constant': stack of layers.0.norm 1 sub-layer, omega 1.000 to 1.000" in attached
    reasons = "calls layer_norm, but not as norm(x), a module with weights; of_another_task does not run on this batch"
    assert off == f"Admin is off: layers.1.norm {reasons}; layers.0.norm is alone in its stack, so omega is 1"


def test_a_model_in_half_precision_is_followed():
    """The trace follows half-precision models, where numbers near 0 have few bits, as some random values here do."""
    for seed in range(4):
        torch.manual_seed(seed)
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 4, 256, batch_first=True), 1).half()
        admin.attach(model, torch.randn(4, 64, 512).half())
        assert len(admin.omegas(model)) == 2


class Pooled(Layer):
    """As in Funnel, its shortcut is a part of the previous norm's output, but its branch reads all of it."""

    def forward(self, x):
        part = x[:, :2]
        return self.norm(part + self.fc2(self.fc1(part) + x.tanh()[:, :2]))


@pytest.mark.parametrize("place, still", [("before", 0), ("layers.1", 1)])
def test_a_shortcut_that_no_norm_wrote_whole_keeps_omega_1(place, still, caplog):
    model = Stack(Layer)
    model.set_submodule(place, nn.Identity() if place == "before" else Pooled())
    admin.attach(model.double(), 3 * X)
    assert ("layers.1.norm keeps omega 1: no norm wrote its shortcut" in caplog.text) == (place == "layers.1")
    learned = [f"layers.{i}.norm.omega_delta" for i in range(3) if i != still]
    assert [key for key in model.state_dict() if "delta" in key] == learned
    omega = list(admin.profile(model, 3 * X).values())
    # This norm keeps ω = 1, but the next ω takes its sum into account: Var[3 x] is about 9.
    assert omega[still] == 1 and (omega[1] > 2.5) == (place == "before")


def test_keep_gives_omega_to_a_shortcut_that_no_norm_wrote_whole():
    model = Stack(Layer)
    model.layers[1] = Pooled()
    admin.attach(model.double(), X, unfoldable="keep")
    assert model.layers[1].norm.omega_delta.requires_grad
    with pytest.raises(ValueError, match="layers.1.norm has a shortcut that no norm wrote as it is"):
        admin.fold(model)


def test_sites_of_the_users_own():
    """`sites=` names, in any order, the sites that can be folded."""
    mixed = Stack(Layer).double()
    mixed.layers[1] = REFUSED["positions"][0]().double()
    with pytest.raises(ValueError, match=r"layers\.0 is not a norm"):
        admin.attach(mixed, X, sites=["layers.0"])
    admin.attach(mixed, X, sites=iter(["layers.2.norm", "layers.0.norm", "layers.2.norm"]))
    assert list(admin.omegas(mixed)) == ["layers.0.norm", "layers.2.norm"]
    assert all(omega.eq(2**0.5).all() for omega in admin.omegas(mixed).values())


def test_what_cannot_be_attached_profiled_or_folded():
    model = Stack(Layer).double()
    for call in (admin.profile, admin.fold, admin.omegas, admin.folded_state_dict):
        with pytest.raises(ValueError, match="Stack is not attached"):
            call(model, *([X] if call is admin.profile else []))
    with pytest.raises(ValueError, match="omega='logn'"):
        admin.attach(model, X, omega="logn")
    compiled = copy.deepcopy(model)
    compiled.layers[1].compile()
    for wrong, name in ((torch.compile(model), "OptimizedModule"), (compiled, "Layer")):
        with pytest.raises(ValueError, match=f"^{name} is compiled, wrapped or sharded; attach to the model before"):
            admin.attach(wrong, X)
    admin.attach(model, X, omega=1)
    for part in (model, model.layers[1]):
        with pytest.raises(ValueError, match="attached already"):
            admin.attach(part, X)
    with pytest.raises(ValueError, match="expected 'reference' or 'paper'"):
        admin.profile(model, X, rule="log")
    with pytest.raises(ValueError, match="a finite number was expected"):
        admin.profile(model, X * math.inf)
    assert all(omega.eq(1).all() for omega in admin.omegas(model).values())
    model.layers[1].norm.omega_delta.data[7] = -1
    with pytest.raises(ValueError, match=r"omega of layers\.1\.norm is 0 .* by it\. Keep the model unfolded\.$"):
        admin.fold(model, X)
    assert len(admin.omegas(model)) == 3


@pytest.mark.parametrize("key", ["weight", "bias", "omega_delta"])
def test_a_trained_model_is_neither_profiled_nor_given_another_omega(key):
    model = admin.attach(Stack(Layer).double(), X, omega=1)
    model.layers[-1].norm.get_parameter(key).data[3] += 1e-3
    with pytest.raises(ValueError, match=r"^layers\.2\.norm differs between channels: the model has been trained"):
        admin.profile(model, X)
    model = admin.fold(model)
    for omega in ("constant", "log") if key != "omega_delta" else ():
        with pytest.raises(ValueError, match="the model has been trained"):
            admin.attach(model, X, omega=omega)
    assert len(admin.omegas(admin.attach(model, X, omega=1))) == 3


def test_training_is_seen_in_parameters_with_axes_of_1():
    model = Stack(FOLDED["a norm's parameters with axes of 1"]).double()
    model.layers[0].norm.gamma.data[0, 0, 3] += 1e-3
    with pytest.raises(ValueError, match=r"^layers\.0\.norm differs between channels"):
        admin.attach(model, X)


def test_profiling_wants_every_sublayer():
    """If a model skips layers at random, profiling fails: it would give skipped layers the ω of others."""
    model = admin.attach(Stack(Layer).double(), X)
    del model.layers[0]
    with pytest.raises(ValueError, match="^2 sub-layers ran in training mode; 3 were expected, one for each"):
        admin.profile(model, X)


class Locked(nn.Module):
    """A custom dropout that returns its argument in evaluation mode."""

    def forward(self, x):
        return x * (torch.rand_like(x[:, :1]) > 0.5) * 2 if self.training else x


@pytest.mark.parametrize(
    "layer, branch",
    [
        (kind(lambda self, x: self.fc1(self.locked(x)), locked=Locked), lambda self, x: self.fc2(self.read(x).tanh())),
        (kind(forward=lambda self, x: self.norm(x if self.training else x + self.fc1(x))), lambda self, x: 0),
    ],
)
def test_in_training_omega_scales_the_shortcut_alone(layer, branch):
    stock = Stack(layer).double()
    model = perturbed(admin.attach(copy.deepcopy(stock), X))
    for part, omega in zip(stock.layers, admin.omegas(model).values()):
        part.forward = lambda x, part=part, omega=omega: part.norm(omega * x + branch(part, x))
    outputs = []
    for either in (model, stock):
        torch.manual_seed(1)
        outputs.append(either(X))
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)
    assert len(admin.profile(admin.attach(Stack(layer).double(), X), X)) == 3


def test_norms_of_one_weight_are_refused():
    """Parameters of one memory are one weight, too: the fold of the second would overwrite the fold of the first."""
    tied, shared = Stack(Layer).double(), Stack(Layer).double()
    tied.layers[1].norm.weight = tied.layers[0].norm.weight
    shared.layers[1].norm.weight.data = shared.layers[0].norm.weight.data
    for model in (tied, shared):
        with pytest.raises(ValueError, match=r"1\.norm would be folded into layers\.0\.norm\.weight, which is used"):
            admin.attach(model, X)


def test_two_models_in_one_are_told_apart():
    model = nn.ModuleDict({name: Stack(Layer).double() for name in "ab"})
    for part in model.values():
        admin.attach(part, X)
    with pytest.raises(ValueError, match="ModuleDict holds 2 attached models; give one of them"):
        admin.omegas(model)
    assert admin.fold(model["a"], X) and len(admin.omegas(model)) == 3


def test_a_state_dict_of_more_or_less_than_weights():
    """The fold keeps get_extra_state's value, and also changes weights that the state dict lacks."""
    model = Stack(kind(extra=lambda: Extra())).double()
    perturbed(admin.attach(model, X))
    assert admin.folded_state_dict(model)["layers.0.extra._extra_state"] == {"count": 3}
    model.state_dict = lambda **options: {}
    before = model(X)
    assert (admin.fold(model)(X) - before).abs().max() < 1e-12


class Extra(nn.Module):
    def get_extra_state(self):
        return {"count": 3}


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
        return Outputs(output.new_zeros(()), (masked, functional.dropout(masked, 0.0, model.training)))

    model = Stack(Layer).double()
    model.register_forward_hook(loss_and_outputs)
    return model


@pytest.mark.parametrize("make, shift", [(with_a_loss_and_masked_outputs, 0.1), (lambda: Halves(Layer), 3.0)])
def test_a_fold_is_compared_and_refused_if_it_is_not_the_same(make, shift):
    """A fold that changes the function is refused, for example if the trace missed a reader of a shortcut."""
    model = perturbed(admin.attach(make(), X))
    admin.fold(copy.deepcopy(model), X)
    model.layers[1].register_forward_pre_hook(lambda layer, args: (args[0] + shift,))
    before = tensors(copy.deepcopy(model)(X))
    with pytest.raises(ValueError, match="the folded model is off by"):
        admin.fold(model, X)
    assert before and all(map(torch.equal, before, tensors(model(X))))


def test_a_fold_that_cannot_be_compared_is_refused():
    named, bound = (admin.attach(Stack(Layer).double(), X) for _ in range(2))
    named.register_forward_hook(lambda model, args, output: SimpleNamespace(logits=output))
    bound.forward = lambda x: Stack.forward(bound, x)  # a deep copy calls the modules of the original
    for model, fault in ((named, "no floats in a SimpleNamespace"), (bound, "a deep copy skips layers.0.norm")):
        with pytest.raises(ValueError, match=rf"^Stack: the fold cannot be compared \({fault}\)\. Call fold\(model\)"):
            admin.fold(model, X)
        admin.fold(model)


def test_a_model_is_copied_after_branches_were_computed_again():
    layer = kind(lambda self, x: checkpoint(self.fc1, x, use_reentrant=False))
    model = admin.attach(Stack(layer).double(), X)
    model(X).sum().backward()
    copy.deepcopy(model)


def test_a_forward_that_failed_leaves_nothing_to_the_next():
    """A failed forward leaves nothing behind. Otherwise it would hold the graph of all earlier layers in memory."""
    model = admin.attach(Stack(Layer).double(), X)
    failing = model.layers[2].fc2.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(X)
    failing.remove()
    left = []
    model.before.register_forward_pre_hook(lambda *_: left.extend(model._admin.sites[2].shortcuts))
    model(X)
    assert not left


@pytest.mark.parametrize("name, mask", [("attention_mask", object()), ("key_padding_mask", torch.ones(2, 50))])
def test_padding_that_is_counted_is_said(name, mask, caplog):
    """If padding is counted, the log says so once per mask, as for wav2vec 2.0, whose mask covers audio samples."""
    model = Stack(Layer).double()
    model.forward = lambda x, **masks: Stack.forward(model, x)
    admin.attach(model, {"x": X, name: mask})
    admin.profile(model, {"x": X, name: mask})
    assert f": {name} has shape {tuple(getattr(mask, 'shape', ()))}, expected (2, 5) as in the layers" in caplog.text


def test_padding_in_a_mapping_of_a_mapping_is_counted_and_that_is_said(caplog):
    model = Stack(Layer).double()
    model.forward = lambda batch: Stack.forward(model, batch["x"])
    admin.attach(model, ({"x": X},))
    admin.profile(model, ({"x": X},))
    assert "Admin: padding is counted: none of batch is a tensor" in caplog.text


class Positional(Stack):
    """Takes positional arguments without names."""

    def forward(self, *inputs):
        return super().forward(*inputs)


def test_a_module_may_have_a_builtin_function_as_its_forward():
    model = Stack(Layer).double()
    model.layers[1].fc1 = nn.Sequential(model.layers[1].fc1, nn.Identity())
    model.layers[1].fc1[1].forward = torch.relu
    assert len(admin.omegas(admin.attach(model, X))) == 3


def test_positional_arguments_need_no_name():
    model = admin.attach(Positional(Layer).double(), (X,))
    assert len(admin.profile(model, (X,))) == 3
    admin.fold(model, (X,))


def test_a_data_loader_is_no_batch():
    """A data loader's batch is refused: its second tensor, the labels, would be taken for a mask."""
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, X))
    with pytest.raises(ValueError, match="a DataLoader is not a batch; give one batch"):
        admin.attach(Stack(Layer).double(), loader)


def test_where_a_norm_is_frozen_so_is_its_omega():
    model = Stack(Layer).double()
    for parameter in model.layers[0].parameters():
        parameter.requires_grad_(False)
    admin.attach(model, X)
    learned = [layer.norm.omega_delta.requires_grad for layer in model.layers]
    assert learned == [False] + [True] * (len(learned) - 1)
