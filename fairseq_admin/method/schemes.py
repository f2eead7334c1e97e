"""One table: what each residual scheme does with norm, shortcut, branch and initial weights.

Every scheme is a Transformer whose sub-layers compute, from their shortcut x and branch f,

    x + f(LN(x))                  if its row's norm is "before" (Pre-LN; one more norm ends the stack)
    LN( a · x + b · f(x) )        if it is "after" (Post-LN)
    a · x + b · f(x)              if it is "none"

with a = 1 and b = 1 unless the row says otherwise. Four mechanisms go further: a layer's input added once more in its
last sub-layer, single numbers in place of norms (fixup.py), one more norm in each branch (branch_norms.py), and a
second stream of states (second_stream.py). A new scheme is a new row and, if needed, a function in initial_weights.py.
This file imports the standard library only, so that recipes can read it without waiting for torch.

    N layers of the encoder   M layers of the decoder   l a layer's number in its stack, from 1   C channels

A language model is a decoder alone, N = 0, and a masked language model is an encoder alone, M = 0. Such a model takes
the decoder's or the encoder's half of a row, unless the scheme's paper has a rule for a single stack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

SIDES = ("encoder", "decoder")
PerStack = tuple[float, float]
"""A number for the encoder and one for the decoder."""

FFN_LAWS = ("xavier", "stock")
"""Initial feed-forward weights: Xavier-uniform with zero bias, as in fairseq until 0.10, or as in fairseq today."""

DEPTH_RULES = ("log", "constant", "linear")
"""Rules that set omega from a stack's depth alone."""
RULES = ("reference", "paper", *DEPTH_RULES)
"""Rules that set omega; the first two profile a batch. A number, such as "12.5", is also a rule: every ω."""

SUBLAYER_NORMS = ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")
"""The norms of a layer in forward order; an encoder's layers lack the second."""


def is_number(rule: str) -> bool:
    """Whether a rule of ω is a number above 0."""
    try:
        return 0 < float(rule) < float("inf")
    except ValueError:
        return False


def by_depth(rule: str) -> bool:
    """Whether a rule of ω needs no batch."""
    return rule in DEPTH_RULES or is_number(rule)


class Layer(Protocol):
    """The attributes of one of fairseq's layers that this package reads."""

    embed_dim: int
    normalize_before: bool
    self_attn: Any
    fc1: nn.Linear
    fc2: nn.Linear
    self_attn_layer_norm: nn.Module
    final_layer_norm: nn.Module


class Stack(Protocol):
    """The attributes of an encoder or a decoder that this package reads."""

    layers: Any
    """A ModuleList of `Layer`s."""
    padding_idx: int
    embed_tokens: Any


class Scheme(NamedTuple):
    """A row of the table."""

    title: str
    """Its name in tables and figures."""
    source: str
    """Paper, section, equation."""
    norm: tuple[str, str] = ("after", "after")
    """Place of the norms in the encoder and in the decoder: "before", "after" or "none"."""
    omega: bool = False
    """Whether a is ω: one vector per sub-layer, profiled, then trained."""
    shortcut: Callable[[int, int], PerStack] | None = None
    """Computes a constant a from N and M."""
    branch: bool = False
    """Whether b is one number per layer, shared by its sub-layers, 0 at first and trained."""
    branch_scale: Callable[[int, int], PerStack] | None = None
    """Computes a constant b from N and M."""
    bottom: bool = False
    """Whether a layer's input is added once more before the layer's last norm."""
    branch_norm: str | None = None
    """The end of a branch that has one more norm: "input", "output" or None."""
    second_stream: bool = False
    """Whether a stack also adds up its branches without norms, and ends in the sum of both."""
    fixup: bool = False
    """Whether Fixup's biases and multipliers, one number each, replace the norms."""
    ffn: str | None = "stock"
    """The initial distribution of the feed-forward weights, one of FFN_LAWS, unless --admin-ffn-init gives another.
    None: the scheme draws them itself (initial_weights.py), from Xavier's distribution."""
    new_layers_only: bool = False
    """Whether the scheme is only for new layers on a pre-trained encoder (new_layers_model.py)."""

    @property
    def stock_layers(self) -> bool:
        """Whether fairseq's own layers compute the scheme; then its state dict is that of a stock Transformer."""
        return self.folds and not (self.omega or self.shortcut or self.branch or self.branch_scale)

    @property
    def folds(self) -> bool:
        """Whether a stock Transformer can compute the scheme, with the weights that fold.py gives it.

        The fold moves a factor on a shortcut or a branch into the weights next to it. Not every scheme has a stock
        counterpart: no layer of fairseq's lacks norms, has two norms per sub-layer, or has one more shortcut or stream.
        """
        return not (self.bottom or self.branch_norm or self.second_stream or "none" in self.norm)


def deepnorm_scales(encoder_layers: int, decoder_layers: int) -> PerStack:
    """DeepNorm's constant a on the shortcut, called alpha in the paper.

    encoder: 0.81 (N⁴M)^(1/16),   decoder: (3M)^(1/4);   one stack of L layers: (2L)^(1/4)
    Wang et al. 2022, section 2, figure 2b. For one stack, the authors' code (microsoft/torchscale) has the same a.

    Args:
        encoder_layers: N; 0 for a decoder alone.
        decoder_layers: M; 0 for an encoder alone.

    Returns:
        The encoder's and the decoder's a.
    """
    if not (encoder_layers and decoder_layers):
        return ((2 * (encoder_layers + decoder_layers)) ** (1 / 4),) * 2
    return 0.81 * (encoder_layers**4 * decoder_layers) ** (1 / 16), (3 * decoder_layers) ** (1 / 4)


def keel_scales(encoder_layers: int, decoder_layers: int) -> PerStack:
    """Keel's constant a on the shortcut: the number of sub-layers of the stack. Chen and Wei 2026

    Args:
        encoder_layers: N; 0 for a decoder alone.
        decoder_layers: M; 0 for an encoder alone.

    Returns:
        The encoder's and the decoder's a.
    """
    return 2.0 * encoder_layers, (3.0 if encoder_layers else 2.0) * decoder_layers


def one_by_depth(encoder_layers: int, decoder_layers: int) -> PerStack:
    """A constant b on the branch: one over the number of layers of the stack. Dey et al. 2025 (CompleteP), table 1

    Args:
        encoder_layers: N; 0 for a decoder alone.
        decoder_layers: M; 0 for an encoder alone.

    Returns:
        The encoder's and the decoder's b.
    """
    return 1 / max(1, encoder_layers), 1 / max(1, decoder_layers)


def stacks_of(model: nn.Module) -> dict[str, Any]:
    """The encoder and the decoder of a model, by side. RoBERTa's encoder holds its stack next to a head.

    Args:
        model: a fairseq model with an `encoder`, a `decoder` or both.

    Returns:
        {"encoder": stack, "decoder": stack}, or the only stack that the model has.
    """
    sides = {side: getattr(model, side) for side in SIDES if hasattr(model, side)}
    return {side: getattr(stack, "sentence_encoder", stack) for side, stack in sides.items()}


def layers_of(stack: Stack) -> tuple[Any, ...]:
    """Find the layers of a stack. (Iterating over a LayerDropModuleList would skip some.)

    Args:
        stack: an encoder or a decoder.

    Returns:
        The layers, in forward order.
    """
    return tuple(stack.layers.children())


def norms_of(layer: Layer) -> list[str]:
    """Find the norms of a layer, one per sub-layer.

    Args:
        layer: one of fairseq's layers.

    Returns:
        Their attribute names, in forward order.
    """
    return [name for name in SUBLAYER_NORMS if getattr(layer, name, None) is not None]


def attentions_of(layer: Layer) -> tuple[Any, ...]:
    """Find the attentions of a layer.

    Args:
        layer: one of fairseq's layers.

    Returns:
        The self-attention and, in a decoder, the encoder-attention.
    """
    both = layer.self_attn, getattr(layer, "encoder_attn", None)
    return tuple(attention for attention in both if attention is not None)


def change_first(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Change a module's output in a hook.

    Args:
        output: a tensor, or a tuple that begins with one, as attentions and decoder layers return it.
        change: computes the new tensor.

    Returns:
        The new tensor, or the tuple with the new tensor in front.
    """
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


def linears_of(layer: Layer) -> tuple[nn.Linear, ...]:
    """Find the linear layers of a layer.

    Args:
        layer: one of fairseq's layers.

    Returns:
        Those of its attentions, then fc1 and fc2.
    """
    attentions = [(each.q_proj, each.k_proj, each.v_proj, each.out_proj) for each in attentions_of(layer)]
    return (*(linear for linears in attentions for linear in linears), layer.fc1, layer.fc2)


SCHEMES: dict[str, Scheme] = {
    "admin": Scheme("Admin", "Liu et al. 2020, section 4.3", omega=True, ffn="xavier"),
    "post-ln": Scheme("Post-LN", "Vaswani et al. 2017, section 3.1"),
    "pre-ln": Scheme("Pre-LN", "Xiong et al. 2020, table 1", norm=("before", "before")),
    # CompleteP also scales Adam's epsilon, and the rates by width; the scheme does not set those.
    "pre-ln-by-depth": Scheme(
        "Pre-LN, branches / L",
        "Dey et al. 2025 (CompleteP), table 1",
        norm=("before", "before"),
        branch_scale=one_by_depth,
    ),
    "post-ln-pre-ln": Scheme("Post-Pre-LN", "Liu et al. 2020, table 1", norm=("after", "before")),
    "deepnorm": Scheme("DeepNorm", "Wang et al. 2022, section 2, figure 2", shortcut=deepnorm_scales, ffn=None),
    # One b per layer, not per sub-layer, as in the authors' code (majumderb/rezero) and in that of Liu et al. 2020.
    "rezero": Scheme("ReZero", "Bachlechner et al. 2020, equation 1", norm=("none", "none"), branch=True),
    "rezero-post-ln": Scheme("ReZero-Post-LN", "Liu et al. 2020, table 3", branch=True),
    # The paper trains without warm-up. The scheme does not set this; --warmup-updates and --lr-scheduler do.
    "t-fixup": Scheme("T-Fixup", "Huang et al. 2020, the steps of T-Fixup", norm=("none", "none"), ffn=None),
    "t-fixup-code": Scheme(
        "T-Fixup (code)",
        "layer6ai-labs/T-Fixup, models/transformer.py and modules/transformer_layer.py",
        norm=("none", "none"),
        ffn=None,
    ),
    "fixup": Scheme("Fixup", "Zhang, Dauphin and Ma 2019, rules 1 to 3", norm=("none", "none"), fixup=True, ffn=None),
    "b2t": Scheme("B2T", "Takase et al. 2022, bottom-to-top connection", bottom=True),
    "b2t-code": Scheme("B2T (code)", "takase/b2t_connection, modules/transformer_layer.py", bottom=True),
    "looklinear": Scheme("LookLinear", "Balduzzi et al. 2017; Liu et al. 2020, table 3", ffn=None),
    "ds-init": Scheme("DS-Init", "Zhang, Titov and Sennrich 2019", ffn=None),
    "ds-init-code": Scheme("DS-Init (code)", "bzhangGo/zero, models/transformer.py", ffn=None),
    "residual": Scheme("ResiDual", "Xie et al. 2023; microsoft/ResiDual", second_stream=True),
    "peri-ln": Scheme("Peri-LN", "Kim et al. 2025", norm=("before", "before"), branch_norm="output"),
    "keel": Scheme("Keel", "Chen and Wei 2026", shortcut=keel_scales, branch_norm="input"),
    # Its weights are divided by μ, which new_layers.py measures on the pre-trained encoder.
    "dt-fixup": Scheme(
        "DT-Fixup",
        "Xu et al. 2021, section 3; BorealisAI/DT-Fixup, spider/semparser",
        norm=("none", "none"),
        ffn=None,
        new_layers_only=True,
    ),
}

MODEL_SCHEMES = tuple(name for name, scheme in SCHEMES.items() if not scheme.new_layers_only)
"""The schemes that a whole model can have; new layers can have any."""
