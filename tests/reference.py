"""Slow, obvious versions of the plugin's arithmetic, and the small models that the tests compare.

T time   B batch   C channels   S sub-layers
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.models.transformer import TransformerModelBase
from fairseq.modules import LayerDropModuleList
from torch import Tensor, nn
from torch.nn import functional

import fairseq_admin.plugin  # noqa: F401  (registers the models)

PAD = 1
"""Index of padding in every fairseq dictionary."""


def dictionary(words: int, first: int = 0) -> Dictionary:
    """fairseq's four special symbols and `words` words, numbered from `first`."""
    result = Dictionary()
    for word in range(first, first + words):
        result.add_symbol(f"w{word}")
    assert result.pad() == PAD
    return result


def build(
    arch: str, words: int | Dictionary = 100, seed: int = 1, target: Dictionary | None = None, **options: Any
) -> TransformerModelBase:
    """A freshly initialised model in training mode: a stock `transformer…`, or a plugin model with plain layers.

    The vocabulary is a dictionary, or has words + 4 entries; unless options say otherwise, all embeddings are tied.
    """
    args = Namespace(share_all_embeddings=True, max_source_positions=256, max_target_positions=256)
    if arch.startswith("transformer_admin"):
        args.admin_fast = "off"
    for name, value in options.items():
        setattr(args, name, value)
    ARCH_CONFIG_REGISTRY[arch](args)
    source = words if isinstance(words, Dictionary) else dictionary(words)
    torch.manual_seed(seed)
    task = SimpleNamespace(source_dictionary=source, target_dictionary=target or source)
    return ARCH_MODEL_REGISTRY[arch].build_model(args, task).train()


def sizes(encoder_layers: int, decoder_layers: int, width: int, ffn: int, heads: int = 4) -> dict[str, int]:
    """Options of a translation model. Both stacks have the same width."""
    each = {"embed_dim": width, "ffn_embed_dim": ffn, "attention_heads": heads}
    both = {f"{side}_{option}": size for side in ("encoder", "decoder") for option, size in each.items()}
    return {"encoder_layers": encoder_layers, "decoder_layers": decoder_layers, **both}


TINY = sizes(2, 2, 64, 128)
"""The sizes of transformer_admin_tiny, for the stock `transformer`."""

INPUTS = ("src_tokens", "src_lengths", "prev_output_tokens")
"""The names that a model's forward has for the parts of a `batch`."""


def batch(
    sentences: int = 8, source: int = 11, target: int = 9, words: int = 100, padded: bool = True, seed: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Random sentences: source tokens (B, source), their lengths (B,), decoder input (B, target).

    With `padded`, sentence b is b % 4 tokens shorter. As in fairseq, sources are padded on the left and targets on the
    right.
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
    """ω by rule `reference`, from the variances of the unscaled shortcuts and of the branches."""
    omega = [1.0]
    for shortcut, branch in zip(shortcuts[:-1], branches[:-1]):
        omega.append(math.sqrt(omega[-1] * omega[-1] * shortcut + branch))
    return omega


def omega_paper(input_variance: float, branches: list[float]) -> list[float]:
    """ω by rule `paper`: ω_i² is the input's variance plus the variances of all earlier branches."""
    return [1.0] + [math.sqrt(input_variance + math.fsum(branches[:i])) for i in range(1, len(branches))]


def normalised(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """LayerNorm written out. Shape (T, B, C)."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias


class Branch(NamedTuple):
    """A sub-layer's branch f, and the parts of its layer that a scheme may need."""

    f: Callable[[Tensor], Tensor]
    first: nn.Module
    last: nn.Module
    """The first and last modules of f, which hold a branch's own norms."""
    b: Tensor | float
    bottom: Tensor | None
    """The layer's input, for the layer's last sub-layer; otherwise None."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.f(x)


Sublayer = Callable[[Tensor, Branch, Any], Tensor]
"""Maps the shortcut (T, B, C), the branch and the sub-layer's norm to the sub-layer's output (T, B, C)."""


def post_ln(a: float = 1.0) -> Sublayer:
    """A sub-layer with its norm after the sum: LN(a x + b f(x))."""
    return lambda x, f, norm: normalised(a * x + f.b * f(x), norm)


def pre_ln(x: Tensor, f: Branch, norm: nn.LayerNorm) -> Tensor:
    """A sub-layer with its norm before the branch: x + b f(LN(x))."""
    return x + f.b * f(normalised(x, norm))


def no_ln(x: Tensor, f: Branch, norm: nn.Module) -> Tensor:
    """A sub-layer without a norm: x + b f(x)."""
    return x + f.b * f(x)


def admin(x: Tensor, f: Branch, norm: Any) -> Tensor:
    """LN(ω x + f(x))"""
    omega = norm.omega_init if norm.omega_delta is None else norm.omega_init + norm.omega_delta
    return normalised(omega * x + f(x), norm)


def b2t(x: Tensor, f: Branch, norm: nn.LayerNorm) -> Tensor:
    """A sub-layer with its norm after the sum. A layer's last sub-layer also adds the layer's input."""
    return normalised(x + f(x) + (0 if f.bottom is None else f.bottom), norm)


def keel(a: float) -> Sublayer:
    """A sub-layer with norms on the branch's input and on the sum: LN(a x + f(LN(x)))."""
    return lambda x, f, norm: normalised(a * x + f(normalised(x, f.first.input_norm)), norm)


def peri_ln(x: Tensor, f: Branch, norm: nn.LayerNorm) -> Tensor:
    """A sub-layer with norms on the branch's input and output: x + LN(f(LN(x)))."""
    return x + normalised(f(normalised(x, norm)), f.last.output_norm)


def fixup(x: Tensor, f: Branch, norm: Any) -> Tensor:
    """x + s f(b + x)"""
    return x + f.last.branch_multiplier * f(x + norm.bias)


class ResiDual:
    """Post-LN's sub-layer. It also sums the stack's input and all branches into d."""

    d: Tensor | None = None

    def __call__(self, x: Tensor, f: Branch, norm: nn.LayerNorm) -> Tensor:
        branch = f(x)
        self.d = (x if self.d is None else self.d) + branch
        return normalised(x + branch, norm)


class Profile:
    """Admin's sub-layer. It measures ω by its rule during the forward, and ignores the norm's own ω.

    Args:
        rule: "reference" or "paper".
        real: which positions count. Shape (T, B).
    """

    def __init__(self, rule: str, real: Tensor) -> None:
        self.rule, self.real = rule, real
        self.shortcuts: list[float] = []
        self.branches: list[float] = []

    def __call__(self, x: Tensor, f: Branch, norm: nn.LayerNorm) -> Tensor:
        branch = f(x)
        self.shortcuts.append(variance(x, self.real))
        self.branches.append(variance(branch, self.real))
        used = omega_reference(self.shortcuts, self.branches)[-1] if self.rule == "reference" else 1.0
        return functional.layer_norm(x * used + branch, norm.normalized_shape, norm.weight, norm.bias, norm.eps)

    @property
    def omega(self) -> list[float]:
        if self.rule == "reference":
            return omega_reference(self.shortcuts, self.branches)
        return omega_paper(self.shortcuts[0], self.branches)


def stack_output(x: Tensor, stack: Any, sublayer: Any) -> Tensor:
    """The stack's output, computed from the last layer's x. Shape (T, B, C)."""
    if isinstance(sublayer, ResiDual):
        return x + normalised(sublayer.d, stack.layer_norm)
    if sublayer is fixup:
        x = x + stack.layer_norm.bias
        return x if stack.layer_norm.multiplier is None else x * stack.layer_norm.multiplier
    return x if stack.layer_norm is None else normalised(x, stack.layer_norm)


def fixup_attention(attention: Any, query: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
    """Multi-head attention from its four matrices alone, with Fixup's bias before the last matrix. Shapes (T, B, C).

    fairseq computes encoder-attention's softmax in single precision. So do we: without norms, that rounding grows
    through the layers.
    """

    def heads(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight.t()).view(x.size(0), x.size(1), attention.num_heads, -1).permute(1, 2, 0, 3)

    q, k, v = (
        heads(x, projection.weight)
        for x, projection in ((query, attention.q_proj), (memory, attention.k_proj), (memory, attention.v_proj))
    )
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1)) + mask
    mixed = torch.softmax(scores if query is memory else scores.float(), -1).to(v.dtype) @ v
    return (mixed.permute(2, 0, 1, 3).flatten(2) + attention.input_bias) @ attention.out_proj.weight.t()


def attend(attention: Any, query: Tensor, memory: Tensor, padding: Tensor, future: bool) -> Tensor:
    """fairseq's attention, without a scheme's hooks. Shapes (T, B, C), (S, B, C), (B, S)."""
    mask = torch.full((len(query), len(memory)), -math.inf, dtype=query.dtype).triu(1) if future else None
    if hasattr(attention, "input_bias"):
        hidden = torch.zeros(padding.shape, dtype=query.dtype).masked_fill(padding, -math.inf)[:, None, None]
        return fixup_attention(attention, query, memory, hidden if mask is None else hidden + mask)
    options = {"key_padding_mask": padding if padding.any() else None, "attn_mask": mask, "need_weights": False}
    # The decoder passes static_kv, which makes fairseq compute the softmax in single precision.
    return attention.forward(query, memory, memory, static_kv=memory is not query, **options)[0]


def feed_forward(layer: Any, x: Tensor) -> Tensor:
    """The feed-forward branch without a scheme's hooks, but with Fixup's biases. Shape (T, B, C)."""
    hidden = layer.fc1.forward(x)
    if hasattr(layer.fc1, "output_bias"):
        hidden = hidden + layer.fc1.output_bias
    hidden = layer.activation_dropout_module(layer.activation_fn(hidden))
    return layer.fc2.forward(hidden + layer.fc2.input_bias if hasattr(layer.fc2, "input_bias") else hidden)


def stack_by_hand(
    stack: Any, words: Tensor, sublayer: Sublayer, memory: Tensor | None, memory_padding: Tensor | None
) -> Tensor:
    """A stack's output, with its layers written out. Dropout is drawn in the model's own order.

    Args:
        words: shape (T, B).
        memory: the encoder's output, shape (S, B, C), or None without an encoder.
        memory_padding: True where the encoder's output is padding, shape (B, S), or None.

    Returns:
        Shape (T, B, C).
    """
    is_decoder, padding = hasattr(stack, "build_decoder_layer"), words.eq(PAD)
    noise = stack.quant_noise or nn.Identity()
    x = stack.embed_scale * stack.embed_tokens(words)
    x = (noise(x) if is_decoder else x) + stack.embed_positions(words)
    x = x if stack.layernorm_embedding is None else normalised(x, stack.layernorm_embedding)
    x = stack.dropout_module(x)
    x = (x if is_decoder else noise(x).masked_fill(padding.unsqueeze(2), 0)).transpose(0, 1)
    if isinstance(stack.layers, LayerDropModuleList):
        torch.rand(len(stack.layers))  # fairseq draws which layers to drop; here none is
    return stack_output(layers_by_hand(stack, x, padding, sublayer, memory, memory_padding), stack, sublayer)


def layers_by_hand(
    stack: Any,
    x: Tensor,
    padding: Tensor,
    sublayer: Sublayer,
    memory: Tensor | None = None,
    memory_padding: Tensor | None = None,
) -> Tensor:
    """The output of a stack's last layer, from the first layer's input. Shapes (T, B, C), and (B, T) for padding."""
    is_decoder = hasattr(stack, "build_decoder_layer")
    for layer in stack.layers.children():
        start, b = x, 1.0 if getattr(layer, "branch_scale", None) is None else layer.branch_scale

        def self_attention(y: Tensor, layer: Any = layer) -> Tensor:
            return layer.dropout_module(attend(layer.self_attn, y, y, padding, is_decoder))

        def encoder_attention(y: Tensor, layer: Any = layer) -> Tensor:
            return layer.dropout_module(attend(layer.encoder_attn, y, memory, memory_padding, False))

        def last(y: Tensor, layer: Any = layer) -> Tensor:
            return layer.dropout_module(feed_forward(layer, y))

        x = sublayer(x, Branch(self_attention, *[layer.self_attn] * 2, b, None), layer.self_attn_layer_norm)
        if memory is not None:
            branch = Branch(encoder_attention, *[layer.encoder_attn] * 2, b, None)
            x = sublayer(x, branch, layer.encoder_attn_layer_norm)
        x = sublayer(x, Branch(last, layer.fc1, layer.fc2, b, start), layer.final_layer_norm)
    return x


def by_hand(model: Any, words: dict[str, Tensor], sublayers: dict[str, Sublayer]) -> Tensor:
    """Logits of a model of any kind and scheme, with its layers written out.

    Args:
        words: input tokens of each stack of the model. Shape (B, T).
        sublayers: the scheme's sub-layer for each stack.

    Returns:
        Logits of the last stack, shape (B, T, V).
    """
    memory, padding = None, None
    for side, tokens in words.items():
        stack = getattr(model, side)
        stack = getattr(stack, "sentence_encoder", stack)
        memory, padding = stack_by_hand(stack, tokens, sublayers[side], memory, padding), tokens.eq(PAD)
    x = memory.transpose(0, 1)
    head = getattr(getattr(model, "encoder", None), "lm_head", None)
    if head is None:
        return x @ model.decoder.output_projection.weight.t()
    x = normalised(head.activation_fn(head.dense(x)), head.layer_norm)
    return x @ stack.embed_tokens.weight.t() + head.bias


def profile_by_hand(
    model: Any, src: Tensor | None, prev: Tensor | None, rule: str, padding_counted: bool = False
) -> list[list[float]]:
    """ω of every stack, with the layers written out: no hooks, no norm's forward, no ω from the model.

    Activations have the model's precision; variances are float64.

    Args:
        src, prev: input tokens of the encoder and of the decoder; None for a stack the model lacks. Shape (B, T).
        padding_counted: take the variances over padding too, as the authors' code does.

    Returns:
        One list per stack: ω of its sub-layers.
    """
    words = {side: tokens for side, tokens in (("encoder", src), ("decoder", prev)) if tokens is not None}
    profiles = {side: Profile(rule, tokens.t().ne(PAD) | padding_counted) for side, tokens in words.items()}
    with torch.no_grad():
        by_hand(model, words, profiles)
    return [profile.omega for profile in profiles.values()]


def scattered(model: nn.Module) -> nn.Module:
    """The model, with a small random value added to every parameter.

    Otherwise scalars and zero matrices all have the same values, and a test could not tell them apart. In models
    without norms, larger values would amplify every rounding error.
    """
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_((0.2 if p.numel() == 1 else 0.03) * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


class PlainRAdam:
    """Rectified Adam (Liu et al. 2020, algorithm 2) for one parameter, in float64, in the authors' variant.

    It makes no step while ρ_t ≤ 5, and applies decoupled weight decay p ← p - lr·wd·p in every step.
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
            # As in torch and the authors' code: eps is added to the root of the raw second moment, before the bias
            # correction.
            adaptive = math.sqrt(1 - beta2**self.t) / (self.v.sqrt() + self.eps)
            self.value = self.value - self.lr * rectifier * (self.m / (1 - beta1**self.t)) * adaptive
