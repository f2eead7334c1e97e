"""One table: what each residual scheme does with norm, shortcut, branch and initial weights.

Every scheme is a Transformer whose sub-layers compute, from their shortcut x and branch f,

    x + f(LN(x))                  where a row's norm is "before" (Pre-LN; a norm more ends the stack)
    LN( a · x + b · f(x) )        where it is "after" (Post-LN)
    a · x + b · f(x)              where there is "none"

with a = 1 and b = 1 unless the row says otherwise. One row adds a layer's input once more in its last sub-layer, and
one puts single numbers in place of its norms (fixup.py). A new scheme is a new row and, if need be, a function that
draws its initial weights.

    N layers of the encoder   M layers of the decoder   l a layer's number in its stack, from 1   C channels

A language model is a decoder alone, N = 0, and a masked one an encoder alone, M = 0. It takes its half of a row, unless
the scheme's paper has something of its own for it.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import AdminError

PerStack = tuple[float, float]
"""A number for the encoder and one for the decoder."""

SUBLAYER_NORMS = ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")
"""The norms of a layer in forward order; an encoder's layers have no second."""


class Scheme(NamedTuple):
    """A row of the table."""

    source: str
    """Paper, section, equation."""
    norm: tuple[str, str] = ("after", "after")
    """Where the norms of the encoder and of the decoder stand: "before", "after" or "none"."""
    omega: bool = False
    """Whether a is ω: one vector a sub-layer, profiled, then trained."""
    shortcut: Callable[[int, int], PerStack] | None = None
    """From N and M to a constant a."""
    branch: bool = False
    """Whether b is one number a layer, shared by its sub-layers, 0 at first and trained."""
    bottom: bool = False
    """Whether a layer's input is added once more before the layer's last norm."""
    fixup: bool = False
    """Whether Fixup's biases and multipliers, one number each, stand in place of the norms."""
    weights: Callable[[Any, Any], None] | None = None
    """Draws initial weights of an encoder and a decoder; without it they are fairseq's own."""

    @property
    def stock_layers(self) -> bool:
        """Whether fairseq's own layers compute the scheme; its state dict is then a stock Transformer's."""
        return not (self.omega or self.shortcut or self.branch or self.bottom or "none" in self.norm)


def deepnorm_scales(encoder_layers: int, decoder_layers: int) -> PerStack:
    """a, the constant on the shortcut of DeepNorm, called alpha in the paper.

    encoder: 0.81 (N⁴M)^(1/16),   decoder: (3M)^(1/4);   one stack of L layers: (2L)^(1/4)
    Wang et al. 2022, section 2, figure 2b; one stack as in the authors' code (microsoft/torchscale), too
    """
    if not (encoder_layers and decoder_layers):
        return ((2 * (encoder_layers + decoder_layers)) ** (1 / 4),) * 2
    return 0.81 * (encoder_layers**4 * decoder_layers) ** (1 / 16), (3 * decoder_layers) ** (1 / 4)


def deepnorm_gains(encoder_layers: int, decoder_layers: int) -> PerStack:
    """The gain of DeepNorm's initial values, attention outputs and feed-forward weights, called beta in the paper.

    encoder: 0.87 (N⁴M)^(-1/16),   decoder: (12M)^(-1/4);   one stack of L layers: (8L)^(-1/4)
    Wang et al. 2022, section 2, figure 2b; one stack as in the authors' code (microsoft/torchscale), too
    """
    if not (encoder_layers and decoder_layers):
        return ((8 * (encoder_layers + decoder_layers)) ** (-1 / 4),) * 2
    return 0.87 * (encoder_layers**4 * decoder_layers) ** (-1 / 16), (12 * decoder_layers) ** (-1 / 4)


def t_fixup_gains(encoder_layers: int, decoder_layers: int) -> PerStack:
    """The gain of T-Fixup's initial values, attention outputs and feed-forward weights; the decoder's for embeddings.

    encoder: 0.67 N^(-1/4),   decoder: (9M)^(-1/4)      Huang et al. 2020, the steps of T-Fixup

    The paper has nothing for a decoder alone: it takes the decoder's gain, though with two sub-layers, not three, a
    layer.
    """
    if not encoder_layers:
        return ((9 * decoder_layers) ** (-1 / 4),) * 2
    return 0.67 * encoder_layers ** (-1 / 4), (9 * decoder_layers) ** (-1 / 4)


def stacks_of(model: Any) -> dict[str, Any]:
    """The encoder and the decoder of a model, where it has them. RoBERTa's encoder holds its stack beside a head."""
    sides = {side: getattr(model, side) for side in ("encoder", "decoder") if hasattr(model, side)}
    return {side: getattr(stack, "sentence_encoder", stack) for side, stack in sides.items()}


def layers_of(stack: Any) -> tuple[Any, ...]:
    """The layers of an encoder or a decoder, in order. (Iterating over a LayerDropModuleList would skip some.)"""
    return tuple(stack.layers.children())


def attentions_of(layer: Any) -> tuple[Any, ...]:
    """A layer's self-attention and, where it has one, its encoder-attention."""
    return tuple(it for it in (layer.self_attn, getattr(layer, "encoder_attn", None)) if it is not None)


def _draw(layer: Any, draw: Callable[..., Tensor], gain: float, query_gain: float = 1.0) -> None:
    """Draw every weight matrix of a layer: with `gain`, but queries and keys with `query_gain`.

    Feed-forward biases become 0, as in the fairseq of those years; attention's keep fairseq's law.
    """
    for attention in attentions_of(layer):
        draw(attention.q_proj.weight, gain=query_gain)
        draw(attention.k_proj.weight, gain=query_gain)
        draw(attention.v_proj.weight, gain=gain)
        draw(attention.out_proj.weight, gain=gain)
    for linear in (layer.fc1, layer.fc2):
        draw(linear.weight, gain=gain)
        nn.init.zeros_(linear.bias)


def deepnorm_weights(encoder: Any, decoder: Any) -> None:
    """Xavier-normal; gain `deepnorm_gains` but for queries and keys, whose gain is 1.

    Wang et al. 2022, section 2, figure 2a
    """
    stacks = (encoder, decoder)
    for stack, gain in zip(stacks, deepnorm_gains(*(len(layers_of(stack)) for stack in stacks))):
        for layer in layers_of(stack):
            _draw(layer, nn.init.xavier_normal_, gain)


def t_fixup_weights(encoder: Any, decoder: Any) -> None:
    """Xavier-uniform; values, attention outputs and feed-forward times `t_fixup_gains`; embeddings times the decoder's.

    Huang et al. 2020, the steps of T-Fixup. The embeddings are N(0, 1/C) before, as fairseq's are; vectors that were
    given are scaled as they are. A matrix tied to several places is scaled once. Where the authors' code differs, the
    paper is followed: the code leaves queries and keys at fairseq's gain of 1/sqrt(2), and takes N, not M, for the
    encoder's embeddings.
    """
    stacks = (encoder, decoder)
    gains = t_fixup_gains(*(len(layers_of(stack)) for stack in stacks))
    for stack, gain in zip(stacks, gains):
        for layer in layers_of(stack):
            _draw(layer, nn.init.xavier_uniform_, gain)
    with torch.no_grad():
        for embedding in {id(stack.embed_tokens): stack.embed_tokens for stack in stacks}.values():
            embedding.weight.mul_(gains[1])


def fixup_weights(encoder: Any, decoder: Any) -> None:
    """Standard weights times L^(-1/(2m-2)) in each of L branches, of m linear layers; a branch's last ones are 0.

    Zhang, Dauphin and Ma 2019, rules 1 and 2 (from memory). As in the authors' code, m is 4 in an attention and 2 in a
    feed-forward layer, L counts both stacks, the standard is Xavier-uniform (with fairseq's gain of 1/sqrt(2) for
    queries, keys and values, which that code draws as one matrix), and an output projection is 0 unless it is tied to
    an embedding. Where that code differs from the paper, in taking L = 12 for every encoder-attention, the paper is
    followed.
    """
    layers = [layer for stack in (encoder, decoder) for layer in layers_of(stack)]
    branches = sum(len(attentions_of(layer)) + 1 for layer in layers)
    for layer in layers:
        for attention in attentions_of(layer):
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
                nn.init.xavier_uniform_(projection.weight, gain=2**-0.5 * branches ** (-1 / 6))
            nn.init.zeros_(attention.out_proj.weight)
        nn.init.xavier_uniform_(layer.fc1.weight, gain=branches ** (-1 / 2))
        nn.init.zeros_(layer.fc2.weight)
    projection = decoder.output_projection
    if projection is not None and all(projection.weight is not it.embed_tokens.weight for it in (encoder, decoder)):
        nn.init.zeros_(projection.weight)


def looklinear_weights(encoder: Any, decoder: Any) -> None:
    """Feed-forward layers that are linear at first: their second half of units is the negative of the first.

        [V, -V] relu([W, -W] x) = V (relu(Wx) - relu(-Wx)) = V W x

    Balduzzi et al. 2017, looks-linear initialisation. W and V are Xavier-uniform and biases 0, as in the code of Liu et
    al. 2020. So it is with gelu and swish, too.

    Raises:
        AdminError: a feed-forward layer's width is odd.
    """
    for stack, side in ((encoder, "encoder"), (decoder, "decoder")):
        for layer in layers_of(stack):
            width = layer.fc1.out_features
            if width % 2:
                raise AdminError(
                    f"--{side}-ffn-embed-dim is {width}; --admin-scheme looklinear mirrors one half in the other and "
                    "needs an even width."
                )
            for linear in (layer.fc1, layer.fc2):
                nn.init.xavier_uniform_(linear.weight)
                nn.init.zeros_(linear.bias)
            with torch.no_grad():
                layer.fc1.weight[width // 2 :] = -layer.fc1.weight[: width // 2]
                layer.fc2.weight[:, width // 2 :] = -layer.fc2.weight[:, : width // 2]


def ds_init_weights(encoder: Any, decoder: Any) -> None:
    """Xavier-uniform with gain 1/sqrt(l), every weight matrix of layer l.

    Zhang, Titov and Sennrich 2019, depth-scaled initialisation with alpha = 1, as in the authors' code
    """
    for stack in (encoder, decoder):
        for number, layer in enumerate(layers_of(stack), 1):
            _draw(layer, nn.init.xavier_uniform_, number**-0.5, number**-0.5)


SCHEMES: dict[str, Scheme] = {
    # Its Xavier feed-forward weights are drawn where its layers are built.
    "admin": Scheme("Liu et al. 2020, section 4.3", omega=True),
    "post-ln": Scheme("Vaswani et al. 2017, section 3.1"),
    "pre-ln": Scheme("Xiong et al. 2020, table 1", norm=("before", "before")),
    "post-ln-pre-ln": Scheme("Liu et al. 2020, table 1", norm=("after", "before")),
    "deepnorm": Scheme("Wang et al. 2022, section 2, figure 2", shortcut=deepnorm_scales, weights=deepnorm_weights),
    # One b a layer, not a sub-layer: so the authors' code has it (majumderb/rezero), and that of Liu et al. 2020.
    "rezero": Scheme("Bachlechner et al. 2020, equation 1", norm=("none", "none"), branch=True),
    "rezero-post-ln": Scheme("Liu et al. 2020, table 3", branch=True),
    # Without warm-up, says the paper; that is --warmup-updates and --lr-scheduler, not the model's to set.
    "t-fixup": Scheme("Huang et al. 2020, the steps of T-Fixup", norm=("none", "none"), weights=t_fixup_weights),
    "fixup": Scheme(
        "Zhang, Dauphin and Ma 2019, rules 1 to 3", norm=("none", "none"), fixup=True, weights=fixup_weights
    ),
    # The paper's figure and the authors' code (takase/b2t_connection), which multiplies a layer's initial weights by
    # N^(-1/2), too; that is left out.
    "b2t": Scheme("Takase et al. 2022, bottom-to-top connection", bottom=True),
    "looklinear": Scheme("Balduzzi et al. 2017; Liu et al. 2020, table 3", weights=looklinear_weights),
    "ds-init": Scheme("Zhang, Titov and Sennrich 2019", weights=ds_init_weights),
}
