"""Small Post-LN models that are put together from kinds of norms, sums, branches and shortcuts, and what they promise.

A layer is norm(join(x, f(x))). It can also be written out with ω: norm(join(ω x, f(x))). `check` attaches to a model
of such layers and compares it with the one that is written out, and then with what the fold gives.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import fairseq_admin.pytorch as admin
from fairseq_admin.errors import AdminError

BATCH, TIME, C = 3, 6, 8
EPS = 1e-13
"""Of norms: so small that it does not matter that LN(x + f/ω) and LN(ω x + f) round their eps into other numbers."""
KEPT = (
    (torch.rand(BATCH, TIME, 1, generator=torch.Generator().manual_seed(3)) > 0.3)
    .double()
    .index_fill(1, torch.tensor(0), 1)
)
"""A mask of positions."""


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / 3)


def zeros(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape))


def module(forward: Callable, **parts: Any) -> nn.Module:
    """A module with these submodules, parameters and buffers, and this forward."""
    made = type("Part", (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        made.register_buffer(name, part) if type(part) is Tensor else setattr(made, name, part)
    return made


def linear(inputs: int = C, outputs: int = C, **options: Any) -> nn.Linear:
    return nn.Linear(inputs, outputs, **options)


def turned(inner: nn.Module) -> nn.Module:
    return module(lambda self, x: self.inner(x.transpose(1, 2)).transpose(1, 2), inner=inner)


def by_hand(self: Any, x: Tensor) -> Tensor:
    apart = x - x.mean(-1, keepdim=True)
    return apart / torch.sqrt(apart.pow(2).mean(-1, keepdim=True) + EPS) * self.g + self.b


def ones() -> nn.Parameter:
    return nn.Parameter(torch.ones(C))


NORMS: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(C, eps=EPS),
    "LayerNorm without weights": lambda: nn.LayerNorm(C, eps=EPS, elementwise_affine=False),
    "RMSNorm": lambda: nn.RMSNorm(C, eps=EPS),
    "written out": lambda: module(by_hand, g=ones(), b=zeros(C)),
    "a deviation": lambda: module(
        lambda s, x: s.g * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + EPS), g=ones()),
    "a weight that starts at 0": lambda: module(lambda s, x: (1 + s.w) * F.rms_norm(x, (C,), eps=EPS), w=zeros(C)),
    "ScaleNorm": lambda: module(
        lambda s, x: s.g * x / x.norm(dim=-1, keepdim=True).clamp_min(EPS), g=nn.Parameter(torch.tensor(3.0))),
    "L2": lambda: module(lambda s, x: 2 * F.normalize(x, dim=-1)),
    "a function": lambda: module(lambda s, x: F.layer_norm(x, (C,), s.w, s.b, EPS), w=parameter(C), b=parameter(C)),
    "BatchNorm": lambda: turned(nn.BatchNorm1d(C, eps=EPS)),
    "GroupNorm": lambda: turned(nn.GroupNorm(2, C, eps=EPS)),
    "a tuple": lambda: module(lambda s, x: (s.norm(x), None), norm=nn.LayerNorm(C, eps=EPS)),
}  # fmt: skip


def written_over(x: Tensor, f: Tensor) -> Tensor:
    x = x.clone()
    x += f
    return x


JOINS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "x + f": lambda s, x, f: x + f,
    "f += x": lambda s, x, f: written_over(f, x),
    "x += f": lambda s, x, f: written_over(x, f),
    "masked": lambda s, x, f: (x + f) * KEPT,
    "masked_fill": lambda s, x, f: (x + f).masked_fill(KEPT < 1, 0),
    "where": lambda s, x, f: torch.where(KEPT > 0, x + f, x),
    "stack": lambda s, x, f: torch.stack([x, f]).sum(0),
    "mean": lambda s, x, f: torch.stack([x, f]).mean(0),
    "alpha": lambda s, x, f: torch.add(x, f, alpha=0.5),
    "x - f": lambda s, x, f: x - f,
    "sum": lambda s, x, f: sum([x, f]),  # type: ignore[list-item]
    "a common factor": lambda s, x, f: (x + f) / math.sqrt(2),
    "dropout": lambda s, x, f: F.dropout(x + f, 0.2, s.training),
    "addcmul": lambda s, x, f: torch.addcmul(x, f, torch.full((C,), 0.9)),
    "lerp": lambda s, x, f: torch.lerp(x, f, 0.5),
    "turned": lambda s, x, f: (x.transpose(0, 1) + f.transpose(0, 1)).transpose(0, 1),
    "flat": lambda s, x, f: (x.reshape(-1, C) + f.reshape(-1, C)).view_as(x),
    "cut": lambda s, x, f: torch.cat([x[:, :2], x[:, 2:]], 1) + f,
    "chunks": lambda s, x, f: torch.cat([a + b for a, b in zip(x.chunk(2, 1), f.chunk(2, 1))], 1),
}
FACTORED: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "DeepNorm": lambda s, x, f: 1.5 * x + f,
    "f - x": lambda s, x, f: f - x,
    "x twice": lambda s, x, f: x + f + x,
    "lerp by 0.3": lambda s, x, f: torch.lerp(x, f, 0.3),
}
"""Sums with another factor at the shortcut: no sub-layers."""


def own_dropout(x: Tensor, training: bool) -> Tensor:
    """It returns its argument in evaluation mode."""
    return x * (torch.rand_like(x[:, :1]) > 0.5) * 2 if training else x


def experts(self: Any, x: Tensor) -> Tensor:
    h = x.reshape(-1, C)
    weight, chosen = self.gate(h).softmax(-1).max(-1)
    out = torch.zeros_like(h)
    for number, expert in enumerate(self.experts):
        at = (chosen == number).nonzero()[:, 0]
        if len(at):
            out.index_add_(0, at, expert(h[at]) * weight[at, None])
    return out.view_as(x)


def in_slices(self: Any, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, :3], out[:, 3:] = self.a(x[:, :3]), self.b(x[:, 3:])
    return out


def attention(self: Any, x: Tensor) -> Any:
    q, k, v = self.qkv(x).view(BATCH, TIME, 3, 2, 4).unbind(2)
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
    return self.out(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)), weights


def feed_forward() -> nn.Sequential:
    return nn.Sequential(linear(C, 12), nn.GELU(), linear(12, C), nn.Dropout(0.1))


def pruned() -> nn.Linear:
    prune.l1_unstructured(made := linear(), "weight", 0.3)
    return made


def tied() -> nn.Module:
    made = module(lambda s, x: s.p(s.q(x).tanh()), p=linear(), q=linear())
    made.q.weight = made.p.weight
    return made


def low_rank() -> nn.Module:
    made = module(lambda s, x: s.base(x) + 2 * s.b(s.a(x)), base=linear(), a=linear(C, 2), b=linear(2, C, bias=False))
    nn.init.zeros_(made.b.weight)
    return made


class Branch(NamedTuple):
    """How a layer makes a branch's module, and calls it."""

    make: Callable[[], Any]
    call: Callable[[Any, Tensor], Tensor] = lambda part, x: part(x)


def inline(call: Callable[[Any, Tensor], Tensor], **parts: Callable[[], Any]) -> Branch:
    """A branch that is computed in the layer's forward: no module returns it. Its parts are the layer's own."""
    return Branch(lambda: parts, call)


FOLDED = {
    "Linear": Branch(linear),
    "without a bias": Branch(lambda: linear(bias=False)),
    "feed-forward": Branch(feed_forward),
    "attention": Branch(lambda: nn.MultiheadAttention(C, 2, 0.1, batch_first=True), lambda p, x: p(x, x, x)[0]),
    "attention over sentences": Branch(
        lambda: nn.MultiheadAttention(C, 2), lambda p, x: p(x, x, x, need_weights=False)[0]),
    "a tuple": Branch(lambda: module(attention, qkv=linear(C, 3 * C), out=linear()), lambda p, x: p(x)[0]),
    "x @ w + b": inline(lambda s, x: x.tanh() @ s.w + s.b0, w=lambda: parameter(C, C), b0=lambda: zeros(C)),
    "addmm": inline(
        lambda s, x: torch.addmm(s.b0, x.reshape(-1, C), s.w).view_as(x),
        w=lambda: parameter(C, C), b0=lambda: zeros(C)),
    "einsum": inline(
        lambda s, x: torch.einsum("bthd,hdc->btc", x.unflatten(2, (2, 4)).tanh(), s.w), w=lambda: parameter(2, 4, C)),
    "halves of the channels": inline(
        lambda s, x: s.p(x[..., :4]) + s.q(x[..., 4:]), p=lambda: linear(4), q=lambda: linear(4)),
    "LayerScale": inline(lambda s, x: s.gamma * s.p(x), p=linear, gamma=lambda: nn.Parameter(torch.full((C,), 0.1))),
    "ReZero": inline(lambda s, x: s.gamma * s.p(x), p=linear, gamma=lambda: zeros(1)),
    "gated": inline(lambda s, x: torch.sigmoid(s.q(x)) * s.p(x), p=linear, q=linear),
    "a product": inline(lambda s, x: s.q(x) * s.p(x), p=linear, q=linear),
    "where": inline(lambda s, x: torch.where(s.q(x) > 0, s.p(x), 0.0), p=linear, q=linear),
    "two branches": inline(lambda s, x: s.p(x) - s.q(x), p=linear, q=feed_forward),
    "a writer twice": inline(lambda s, x: s.p(x.tanh()) + s.p(x.cos()), p=linear),
    "masked": inline(lambda s, x: s.p(x) * KEPT, p=linear),
    "dropped": inline(lambda s, x: F.dropout(s.p(x), 0.2, s.training), p=linear),
    "a dropout of one's own": Branch(
        lambda: nn.Sequential(linear(), module(lambda s, x: own_dropout(x, s.training)))),
    "chunked": inline(lambda s, x: torch.cat([s.p(part) for part in x.chunk(2, 1)], 1), p=feed_forward),
    "a factor": inline(lambda s, x: 0.5 * s.p(x), p=linear),
    "written over": inline(lambda s, x: s.p(x).add_(s.b0), p=lambda: linear(bias=False), b0=lambda: zeros(C)),
    "ReLU": Branch(lambda: nn.Sequential(linear(), nn.Dropout(0.2), nn.ReLU())),
    "max pooling": inline(lambda s, x: F.max_pool1d(s.p(x).transpose(1, 2), 3, 1, 1).transpose(1, 2), p=linear),
    "SwiGLU": Branch(
        lambda: module(lambda s, x: s.o(F.silu(s.g(x)) * s.a(x)), a=linear(C, 12), g=linear(C, 12), o=linear(12, C))),
    "Conv1d": Branch(lambda: turned(nn.Conv1d(C, C, 3, padding=1))),
    "grouped Conv1d": Branch(lambda: turned(nn.Conv1d(C, C, 1, groups=4))),
    "BatchNorm at the end": Branch(lambda: turned(nn.Sequential(nn.Conv1d(C, C, 3, padding=1), nn.BatchNorm1d(C)))),
    "LayerNorm at the end": Branch(lambda: nn.Sequential(linear(), nn.LayerNorm(C))),
    "a nested residual, then a writer": Branch(
        lambda: module(lambda s, x: s.c((h := s.a(x)) + s.b(h).tanh()), a=linear(), b=linear(), c=linear())),
    "weight_norm": Branch(lambda: parametrizations.weight_norm(linear())),
    "pruned": Branch(pruned),
    "LoRA": Branch(low_rank),
    "slices": Branch(lambda: module(in_slices, a=linear(), b=linear())),
    "over time": Branch(lambda: turned(linear(TIME, TIME))),
    "Embedding": Branch(lambda: nn.Embedding(5, C), lambda p, x: p((x[..., 0] > 0).long() + (x[..., 1] > 0).long())),
    "LSTM, then a writer": Branch(
        lambda: module(lambda s, x: s.p(s.r(x)[0]), r=nn.LSTM(C, C, batch_first=True), p=linear())),
    "Bilinear": Branch(lambda: nn.Bilinear(C, C, C), lambda p, x: p(x.contiguous(), x.tanh())),
}  # fmt: skip
KEPT_ONLY = {
    "GELU": Branch(lambda: nn.Sequential(linear(), nn.GELU())),
    "tanh": Branch(lambda: nn.Sequential(linear(), nn.Tanh())),
    "ReLU6": Branch(lambda: nn.Sequential(linear(), nn.ReLU6())),
    "GLU": Branch(lambda: nn.Sequential(linear(C, 2 * C), nn.GLU())),
    "a nested residual": Branch(lambda: module(lambda s, x: (h := s.a(x)) + s.b(h).tanh(), a=linear(), b=linear())),
    "BatchNorm without weights at the end": Branch(
        lambda: turned(nn.Sequential(nn.Conv1d(C, C, 3, padding=1), nn.BatchNorm1d(C, affine=False)))),
    "LayerNorm without weights at the end": Branch(
        lambda: nn.Sequential(linear(), nn.LayerNorm(C, elementwise_affine=False))),
    "spectral_norm": Branch(lambda: parametrizations.spectral_norm(linear())),
    "tied": Branch(tied),
    "noise in training": Branch(
        lambda: nn.Sequential(linear(), module(lambda s, x: x + torch.randn_like(x) if s.training else x))),
    "attention without a writer": Branch(
        lambda: module(lambda s, x: F.scaled_dot_product_attention(*s.qkv(x).chunk(3, -1)), qkv=linear(C, 3 * C))),
    "LSTM": Branch(lambda: nn.LSTM(C, C, batch_first=True), lambda p, x: p(x)[0]),
}  # fmt: skip
"""Branches that are not proportional to weights, but that a module returns."""
REFUSED = {
    "GELU": inline(lambda s, x: F.gelu(s.p(x)), p=linear),
    "ELU": inline(lambda s, x: F.elu(s.p(x)), p=linear),
    "a square": inline(lambda s, x: s.p(x).relu().pow(2), p=linear),
    "a bound": inline(lambda s, x: s.p(x).clamp(-99, 99), p=linear),
    "L2 at the end": inline(lambda s, x: F.normalize(s.p(x), dim=-1), p=linear),
    "a writer of a writer": inline(lambda s, x: s.p(s.p(x)), p=linear),
    "a fixed table": inline(lambda s, x: s.p(x) + torch.arange(C), p=linear),
    "a number": inline(lambda s, x: s.p(x) + 0.5, p=linear),
    "an FFT": inline(lambda s, x: torch.fft.fft(x, dim=1).real),
    "x @ (w + 1)": inline(lambda s, x: x @ (s.w + 1), w=lambda: parameter(C, C)),
}
"""Branches that are not proportional to weights, and that no module returns."""
MAYBE = {
    "experts": Branch(
        lambda: module(experts, gate=linear(C, 3), experts=nn.ModuleList(feed_forward() for _ in range(3)))
    )
}
"""Refused if an expert gets no token of the batch, else folded."""
BRANCHES = (
    FOLDED
    | {f"{name}, kept": branch for name, branch in KEPT_ONLY.items()}
    | {f"{n}, refused": b for n, b in REFUSED.items()}
    | MAYBE
)

SHORTCUTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "x": lambda s, x: x,
    "dropout": lambda s, x: F.dropout(x, 0.1, s.training),
    "a dropout of one's own": lambda s, x: own_dropout(x, s.training),
    "clone": lambda s, x: x.clone(),
    "detach": lambda s, x: x.detach(),
    "module": lambda s, x: s.identity(x),
    "cut": lambda s, x: torch.cat([x[:, :2], x[:, 2:]], 1),
}


class Kind(NamedTuple):
    norm: str = "LayerNorm"
    join: str = "x + f"
    branch: str = "feed-forward"
    shortcut: str = "x"


class Layer(nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind, self.omega, self.identity, self.norm = kind, 1.0, nn.Identity(), NORMS[kind.norm]()
        parts = BRANCHES[kind.branch].make()
        for name, part in (parts if isinstance(parts, dict) else {"part": lambda: parts}).items():
            setattr(self, name, part())

    def forward(self, x: Tensor) -> Tensor:
        branch = BRANCHES[self.kind.branch].call
        f = branch(getattr(self, "part", self), x)
        x = SHORTCUTS[self.kind.shortcut](self, x)
        total = (JOINS | FACTORED)[self.kind.join](self, x * self.omega if self.omega != 1 else x, f)
        result = self.norm(total)
        return result[0] if isinstance(result, tuple) else result


class Model(nn.Module):
    """A norm, layers of these kinds, called once or twice, and a projection. It also returns the layers' outputs."""

    def __init__(self, kinds: list[Kind], seed: int, rounds: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.before, self.out, self.rounds = nn.LayerNorm(C), linear(), rounds
        self.layers = nn.ModuleList(Layer(kind) for kind in kinds)
        self.double()

    def forward(self, x: Tensor) -> list[Tensor]:
        results = [self.before(x)]
        for layer in [*self.layers] * self.rounds:
            results.append(layer(results[-1]))
        return [self.out(results[-1]), *results]


def apart(one: nn.Module, other: Any, x: Tensor, training: bool) -> float:
    """The largest difference of all outputs of two models, with the same random numbers."""
    outputs = []
    for model in (one, other):
        torch.manual_seed(5)
        outputs.append(model.train(training)(x) if isinstance(model, nn.Module) else model)
    return max((a - b).abs().max().item() for a, b in zip(*outputs))


def check(kinds: list[Kind], rounds: int = 1, seed: int = 0) -> str:
    """Attach to a model and check all promises. Returns "folded", "kept" or the reason of a refusal."""
    stock, model, hand, plain = (Model(kinds, seed, rounds) for _ in range(4))
    x = torch.randn(BATCH, TIME, C, generator=torch.Generator().manual_seed(seed + 7), dtype=torch.float64)
    before, kept = copy.deepcopy(model.state_dict()), False
    try:
        admin.attach(model, x, omega=1)
    except AdminError as error:
        assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
        try:
            admin.attach(model, x, omega=1, unfoldable="keep")
            kept = True
        except AdminError:
            return str(error)
    assert list(model._admin.stacks.values()) == [len(kinds) * rounds], (model._admin.stacks, model._admin.off)
    assert apart(model, stock, x, training=True) == 0
    generator = torch.Generator().manual_seed(seed)
    raw = {}
    with torch.no_grad():
        for weight in model.parameters():  # as after training
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
        for number, layer in enumerate(hand.layers):
            layer.omega = 1 + 3 * torch.rand((), generator=generator).item()
            for name, omega in admin.omegas(model).items():
                if name.startswith(f"layers.{number}."):
                    omega.fill_(layer.omega)
    raw = {branch.name: branch.name for branch in model._admin.branches if branch.place is None}

    def stock_name(key: str) -> str:
        name = key.removesuffix(".original").replace("parametrizations.", "") if key.endswith(".original") else key
        return name if name in raw else key

    weights = {stock_name(key): w for key, w in model.state_dict().items() if not key.endswith("admin_omega")}
    hand.load_state_dict(weights)
    # 1e-13 in the norms' eps, times the derivative of a few layers.
    assert apart(model, hand, x, training=True) < 1e-8, "the forward in training is not LN(ωx + f)"
    hand.load_state_dict({stock_name(k): w for k, w in model.state_dict().items() if not k.endswith("admin_omega")})
    if all(kind.norm != "BatchNorm" for kind in kinds):  # its running averages are those of the sum
        assert apart(model, hand, x, training=False) < 1e-8, "the forward in evaluation is not LN(ωx + f)"
    if kept:
        return "kept"
    outputs = model.eval()(x)
    plain.load_state_dict(admin.folded_state_dict(model))
    assert apart(plain, outputs, x, training=False) < 1e-11  # a few roundings of 1e-16 a layer
    pruned = any(kind.branch == "pruned" for kind in kinds)  # torch cannot copy it after a forward
    attached = model if pruned else copy.deepcopy(model)
    admin.fold(model, x)
    assert apart(model, outputs, x, training=False) < 1e-11
    assert apart(model, attached, x, training=True) < 1e-11
    return "folded"
