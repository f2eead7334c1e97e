"""Plain twins of the plugin's arithmetic, slow and obvious, and the small models the tests compare.

T time   B batch   C channels   S sub-layers
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.models.transformer import TransformerModelBase
from torch import Tensor, nn
from torch.nn import functional

import fairseq_admin  # noqa: F401  (registers transformer_admin)

PAD = 1
"""Index of padding in every fairseq dictionary."""


def dictionary(words: int) -> Dictionary:
    """fairseq's four special symbols and `words` words."""
    result = Dictionary()
    for word in range(words):
        result.add_symbol(f"w{word}")
    assert result.pad() == PAD
    return result


def build(arch: str, words: int = 100, seed: int = 1, **options: Any) -> TransformerModelBase:
    """A freshly initialised model in training mode: a stock `transformer…` or one of ours, of plain layers.

    Vocabulary of words + 4, all embeddings tied.
    """
    args = Namespace(share_all_embeddings=True, max_source_positions=256, max_target_positions=256)
    if arch.startswith("transformer_admin"):
        args.admin_fast = "off"
    for name, value in options.items():
        setattr(args, name, value)
    ARCH_CONFIG_REGISTRY[arch](args)
    words_of = dictionary(words)
    torch.manual_seed(seed)
    task = SimpleNamespace(source_dictionary=words_of, target_dictionary=words_of)
    return ARCH_MODEL_REGISTRY[arch].build_model(args, task).train()


TINY = {
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_embed_dim": 64 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_embed_dim": 128 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
}
"""The sizes of transformer_admin_tiny, for the stock `transformer`."""


def batch(
    sentences: int = 8, source: int = 11, target: int = 9, words: int = 100, padded: bool = True, seed: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Random sentences: source tokens (B, source), their lengths (B,), decoder input (B, target).

    With `padded`, sentence b is b % 4 tokens shorter; sources are padded on the left and targets on the right, as
    fairseq's batches are.
    """
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(4, words + 4, (sentences, source), generator=generator)
    prev = torch.randint(4, words + 4, (sentences, target), generator=generator)
    src[:, -1] = prev[:, 0] = 2
    lengths = torch.full((sentences,), source)
    if padded:
        for b in range(sentences):
            lengths[b] -= b % 4
            src[b, : b % 4] = PAD
            prev[b, target - b % 4 :] = PAD
    return src, lengths, prev


def variance(x: Tensor, real: Tensor) -> float:
    """Population variance over all channels of all real positions, entry by entry. Shapes (T, B, C) and (T, B)."""
    values = [
        float(x[t, b, c]) for t in range(x.size(0)) for b in range(x.size(1)) if real[t, b] for c in range(x.size(2))
    ]
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / len(values)


def omega_reference(shortcuts: list[float], branches: list[float]) -> list[float]:
    """Rule `reference` from the variances of the unscaled shortcuts and of the branches."""
    omega = [1.0]
    for shortcut, branch in zip(shortcuts[:-1], branches[:-1]):
        omega.append(math.sqrt(omega[-1] * omega[-1] * shortcut + branch))
    return omega


def omega_paper(input_variance: float, branches: list[float]) -> list[float]:
    """Rule `paper`: ω_i² is the input's variance plus those of all branches before."""
    return [1.0] + [math.sqrt(input_variance + math.fsum(branches[:i])) for i in range(1, len(branches))]


def profile_by_hand(model: TransformerModelBase, src: Tensor, prev: Tensor, rule: str, padding_counted: bool = False):
    """ω of both stacks, the layers written out: no hooks, no use of the norms' forward or of ω in the model.

    Draws dropout masks in the order in which the model does; works in the model's precision, variances in float64.

    Args:
        padding_counted: take the variances over padding too, as the authors' code does.

    Returns:
        ω of the encoder's and of the decoder's sub-layers, one list each.
    """
    src_pad, prev_pad = src.eq(PAD), prev.eq(PAD)
    omegas: list[list[float]] = []

    def run(layers: Iterable[nn.Module], x: Tensor, real: Tensor, encoder_out: Tensor | None) -> Tensor:
        if padding_counted:
            real = torch.ones_like(real)
        omega, omega_next = [], 1.0
        branches: list[float] = []
        input_variance = variance(x, real)

        def add(branch: Tensor, shortcut: Tensor, norm: nn.LayerNorm) -> Tensor:
            nonlocal omega_next
            branches.append(variance(branch, real))
            used = omega_next if rule == "reference" else 1.0
            if rule == "reference":
                omega.append(used)
                omega_next = math.sqrt(used * used * variance(shortcut, real) + branches[-1])
            return functional.layer_norm(shortcut * used + branch, (x.size(2),), norm.weight, norm.bias, norm.eps)

        for layer in layers:
            if encoder_out is None:
                f, _ = layer.self_attn(x, x, x, key_padding_mask=src_pad if src_pad.any() else None, need_weights=False)
            else:
                future = torch.full((x.size(0), x.size(0)), -math.inf, dtype=x.dtype).triu(1)
                mask = prev_pad if prev_pad.any() else None
                f, _ = layer.self_attn(x, x, x, key_padding_mask=mask, need_weights=False, attn_mask=future)
            x = add(layer.dropout_module(f), x, layer.self_attn_layer_norm)
            if encoder_out is not None:
                mask = src_pad if src_pad.any() else None
                f, _ = layer.encoder_attn(x, encoder_out, encoder_out, key_padding_mask=mask, need_weights=False)
                x = add(layer.dropout_module(f), x, layer.encoder_attn_layer_norm)
            f = layer.fc2(layer.activation_dropout_module(layer.activation_fn(layer.fc1(x))))
            x = add(layer.dropout_module(f), x, layer.final_layer_norm)
        omegas.append(omega if rule == "reference" else omega_paper(input_variance, branches))
        return x

    with torch.no_grad():
        x, _ = model.encoder.forward_embedding(src)
        x = x.masked_fill(src_pad.unsqueeze(-1), 0).transpose(0, 1)
        encoder_out = run(model.encoder.layers, x, ~src_pad.t(), None)
        decoder = model.decoder
        x = decoder.embed_scale * decoder.embed_tokens(prev) + decoder.embed_positions(prev)
        run(decoder.layers, decoder.dropout_module(x).transpose(0, 1), ~prev_pad.t(), encoder_out)
    return omegas


def normalised(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """LayerNorm written out. Shape (T, B, C)."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias


def post_ln(a: float = 1.0) -> Callable[..., Tensor]:
    """A sub-layer with its norm after the sum: LN(a x + b f(x))."""
    return lambda x, f, norm, b: normalised(a * x + b * f(x), norm)


def pre_ln(x: Tensor, f: Callable[[Tensor], Tensor], norm: nn.LayerNorm, b: float) -> Tensor:
    """A sub-layer with its norm before the branch: x + f(LN(x))."""
    return x + f(normalised(x, norm))


def no_ln(x: Tensor, f: Callable[[Tensor], Tensor], norm: nn.Module, b: float) -> Tensor:
    """A sub-layer without a norm: x + b f(x)."""
    return x + b * f(x)


def b2t(x: Tensor, f: Callable[[Tensor], Tensor], norm: nn.LayerNorm, b: float, bottom: Tensor | None) -> Tensor:
    """A sub-layer with its norm after the sum, to which the last of a layer adds the layer's input."""
    return normalised(x + f(x) + (0 if bottom is None else bottom), norm)


class Branch:
    """f, and the modules that it begins and ends with, which hold a branch's own norms."""

    def __init__(self, f: Callable[[Tensor], Tensor], first: nn.Module, last: nn.Module) -> None:
        self.f, self.first, self.last = f, first, last

    def __call__(self, x: Tensor) -> Tensor:
        return self.f(x)


def keel(a: float) -> Callable[..., Tensor]:
    """A sub-layer with norms of the branch's input and of the sum: LN(a x + f(LN(x)))."""
    return lambda x, f, norm, b: normalised(a * x + f(normalised(x, f.first.input_norm)), norm)


def peri_ln(x: Tensor, f: Branch, norm: nn.LayerNorm, b: float) -> Tensor:
    """A sub-layer with norms of the branch's input and output: x + LN(f(LN(x)))."""
    return x + normalised(f(normalised(x, norm)), f.last.output_norm)


class ResiDual:
    """Post-LN's sub-layer, which also adds up d, the stack's input and all branches."""

    d: Tensor | None = None

    def __call__(self, x: Tensor, f: Branch, norm: nn.LayerNorm, b: float) -> Tensor:
        self.d = (x if self.d is None else self.d) + f(x)
        return normalised(x + f(x), norm)


def ended(x: Tensor, stack: nn.Module, sublayer: Callable[..., Tensor]) -> Tensor:
    """What a stack gives for its last layer's x. Shape (T, B, C)."""
    if isinstance(sublayer, ResiDual):
        d, sublayer.d = sublayer.d, None
        return x + normalised(d, stack.layer_norm)
    return normalised(x, stack.layer_norm) if sublayer in (pre_ln, peri_ln) else x


def scheme_by_hand(
    model: TransformerModelBase,
    src: Tensor,
    prev: Tensor,
    sublayers: tuple[Callable[..., Tensor], Callable[..., Tensor]],
    b: dict[str, list[float]] | None = None,
) -> Tensor:
    """Logits of a model of any scheme, its layers written out; for batches without padding, without dropout.

    Args:
        sublayers: the encoder's sub-layer and the decoder's: `post_ln(a)`, `pre_ln` or `no_ln`.
        b: the scale of every layer's branches, {"encoder": [...], "decoder": [...]}; 1 by default.

    Returns:
        Shape (B, T, V).
    """
    stacks = {"encoder": model.encoder, "decoder": model.decoder}
    outputs: dict[str, Tensor] = {}
    for (side, stack), words, sublayer in zip(stacks.items(), (src, prev), sublayers):
        x = (stack.embed_scale * stack.embed_tokens(words) + stack.embed_positions(words)).transpose(0, 1)
        future = torch.full((x.size(0), x.size(0)), -math.inf, dtype=x.dtype).triu(1) if side == "decoder" else None
        for number, layer in enumerate(stack.layers):

            def self_attention(y: Tensor, layer=layer, mask=future) -> Tensor:
                return layer.self_attn.forward(y, y, y, need_weights=False, attn_mask=mask)[0]

            def encoder_attention(y: Tensor, layer=layer) -> Tensor:
                # static_kv, as the decoder has it: fairseq then takes the softmax in single precision.
                memory = outputs["encoder"]
                return layer.encoder_attn.forward(y, memory, memory, need_weights=False, static_kv=True)[0]

            def feed_forward(y: Tensor, layer=layer) -> Tensor:
                hidden = (y @ layer.fc1.weight.t() + layer.fc1.bias).clamp(min=0)
                return hidden @ layer.fc2.weight.t() + layer.fc2.bias

            scale = b[side][number] if b else 1.0
            if sublayer is b2t:
                first, last = (lambda *a: b2t(*a, None)), (lambda *a, bottom=x: b2t(*a, bottom))
            else:
                first = last = sublayer
            x = first(x, Branch(self_attention, *[layer.self_attn] * 2), layer.self_attn_layer_norm, scale)
            if side == "decoder":
                branch = Branch(encoder_attention, *[layer.encoder_attn] * 2)
                x = first(x, branch, layer.encoder_attn_layer_norm, scale)
            x = last(x, Branch(feed_forward, layer.fc1, layer.fc2), layer.final_layer_norm, scale)
        outputs[side] = ended(x, stack, sublayer)
    return outputs["decoder"].transpose(0, 1) @ model.decoder.embed_tokens.weight.t()


def scattered(model: nn.Module) -> nn.Module:
    """The model, every parameter moved by a small random value: only then can single numbers and zero matrices be told
    apart. A large one would, without norms, blow up every rounding error.
    """
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_((0.2 if p.numel() == 1 else 0.03) * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def fixup_attention(attention: nn.Module, query: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
    """Multi-head attention from its four matrices alone, with Fixup's bias before the last. Shapes (T, B, C).

    fairseq takes encoder-attention's softmax in single precision; without norms, that rounding grows through the
    layers.
    """
    single = query is not memory

    def heads(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight.t()).view(x.size(0), x.size(1), attention.num_heads, -1).permute(1, 2, 0, 3)

    q, k, v = (
        heads(x, projection.weight)
        for x, projection in ((query, attention.q_proj), (memory, attention.k_proj), (memory, attention.v_proj))
    )
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
    scores = scores if mask is None else scores + mask
    mixed = torch.softmax(scores.float() if single else scores, -1).to(v.dtype) @ v
    mixed = mixed.permute(2, 0, 1, 3).flatten(2) + attention.input_bias
    return attention.branch_multiplier * (mixed @ attention.out_proj.weight.t())


class PlainRAdam:
    """Rectified Adam as published (Liu et al. 2020, algorithm 2), one parameter, float64; the authors' variant.

    No step while ρ_t ≤ 5; decoupled weight decay p ← p - lr·wd·p in every step.
    """

    def __init__(self, value: Tensor, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        self.value = value.double().clone()
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.m = torch.zeros_like(self.value)
        self.v = torch.zeros_like(self.value)
        self.t = 0

    def step(self, gradient: Tensor) -> None:
        g = gradient.double()
        beta1, beta2 = self.betas
        self.t += 1
        self.m = beta1 * self.m + (1 - beta1) * g
        self.v = beta2 * self.v + (1 - beta2) * g * g
        self.value = self.value - self.lr * self.weight_decay * self.value
        rho_inf = 2 / (1 - beta2) - 1
        rho = rho_inf - 2 * self.t * beta2**self.t / (1 - beta2**self.t)
        if rho > 5:
            rectifier = math.sqrt((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho))
            # In torch and in the authors' code, eps is added to the root of the raw second moment, before the bias
            # correction is divided out.
            adaptive = math.sqrt(1 - beta2**self.t) / (self.v.sqrt() + self.eps)
            self.value = self.value - self.lr * rectifier * (self.m / (1 - beta1**self.t)) * adaptive
