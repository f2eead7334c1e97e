"""The initial weights of the schemes that do not keep those of fairseq.

Each function changes a model's stacks in place: {"encoder": stack, "decoder": stack}, or the only stack that the model
has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from ..errors import AdminError
from .schemes import SIDES, Layer, PerStack, Stack, attentions_of, layers_of, linears_of

Stacks = Mapping[str, Stack]


def _depths(stacks: Stacks) -> tuple[int, int]:
    """Layers of the encoder and of the decoder."""
    encoder, decoder = (len(layers_of(stacks[side])) if side in stacks else 0 for side in SIDES)
    return encoder, decoder


def _layers(stacks: Stacks, per_stack: PerStack = (1.0, 1.0)) -> Iterator[tuple[Layer, int, float]]:
    """Yield (layer, number, value) for every layer in forward order.

    The number counts the layers of a stack, from 1. The value is the stack's entry of `per_stack`.
    """
    for side, value in zip(SIDES, per_stack):
        if side in stacks:
            for number, layer in enumerate(layers_of(stacks[side]), 1):
                yield layer, number, value


def deepnorm_gains(encoder_layers: int, decoder_layers: int) -> PerStack:
    """DeepNorm's gain for values, attention outputs and feed-forward weights, called beta in the paper.

    encoder: 0.87 (N⁴M)^(-1/16),   decoder: (12M)^(-1/4);   one stack of L layers: (8L)^(-1/4)
    Wang et al. 2022, section 2, figure 2b. The authors' code (microsoft/torchscale) has 1.15 for 0.87.

    Args:
        encoder_layers: N; 0 for a decoder alone.
        decoder_layers: M; 0 for an encoder alone.

    Returns:
        The encoder's and the decoder's gain.
    """
    if not (encoder_layers and decoder_layers):
        return ((8 * (encoder_layers + decoder_layers)) ** (-1 / 4),) * 2
    return 0.87 * (encoder_layers**4 * decoder_layers) ** (-1 / 16), (12 * decoder_layers) ** (-1 / 4)


def t_fixup_gains(encoder_layers: int, decoder_layers: int) -> PerStack:
    """T-Fixup's gain for values, attention outputs and feed-forward weights; embeddings take the decoder's gain.

    encoder: 0.67 N^(-1/4),   decoder: (9M)^(-1/4)      Huang et al. 2020, the steps of T-Fixup

    The paper has no rule for a decoder alone. We use the decoder's gain, although each layer then has two sub-layers
    instead of three.

    Args:
        encoder_layers: N; 0 for a decoder alone.
        decoder_layers: M.

    Returns:
        The encoder's and the decoder's gain.

    Raises:
        AdminError: M is 0.
    """
    if not decoder_layers:
        raise AdminError(
            "T-Fixup was given for an encoder alone, for which its paper has no gain; expected a decoder too. Give "
            "another scheme (fixup, for one without norms)."
        )
    if not encoder_layers:
        return ((9 * decoder_layers) ** (-1 / 4),) * 2
    return 0.67 * encoder_layers ** (-1 / 4), (9 * decoder_layers) ** (-1 / 4)


def _draw(layer: Layer, draw: Callable[..., Tensor], gain: float, query_gain: float = 1.0) -> None:
    """Draw every weight matrix of a layer: queries and keys with `query_gain`, the others with `gain`.

    Feed-forward biases become 0, as in the fairseq of the papers. Attention biases keep the initial values of today's
    fairseq.
    """
    for attention in attentions_of(layer):
        draw(attention.q_proj.weight, gain=query_gain)
        draw(attention.k_proj.weight, gain=query_gain)
        draw(attention.v_proj.weight, gain=gain)
        draw(attention.out_proj.weight, gain=gain)
    for linear in (layer.fc1, layer.fc2):
        draw(linear.weight, gain=gain)
        nn.init.zeros_(linear.bias)


def deepnorm_weights(stacks: Stacks) -> None:
    """Xavier-normal with gain `deepnorm_gains`; queries and keys with gain 1.

    Wang et al. 2022, section 2, figure 2a
    """
    for layer, _, gain in _layers(stacks, deepnorm_gains(*_depths(stacks))):
        _draw(layer, nn.init.xavier_normal_, gain)


def t_fixup_weights(stacks: Stacks, code: bool = False) -> None:
    """Draw matrices Xavier-uniform. Multiply values, attention outputs and feed-forward weights by `t_fixup_gains`.

    The embeddings are multiplied by the decoder's gain.

    Huang et al. 2020, the steps of T-Fixup. The embeddings are fairseq's N(0, 1/C), or vectors from a file, before they
    are scaled. A matrix tied to several places is scaled once.

    Args:
        stacks: the encoder, the decoder or both.
        code: follow the authors' code (layer6ai-labs/T-Fixup): queries and keys keep fairseq's gain of 1/sqrt(2), and
            the encoder's embeddings, shared ones too, are multiplied by (9N)^(-1/4).
    """
    encoder_layers, decoder_layers = _depths(stacks)
    gains = t_fixup_gains(encoder_layers, decoder_layers)
    for layer, _, gain in _layers(stacks, gains):
        _draw(layer, nn.init.xavier_uniform_, gain, query_gain=2**-0.5 if code else 1.0)
    _scale_embeddings(stacks, ((9 * encoder_layers) ** (-1 / 4) if code and encoder_layers else gains[1], gains[1]))


@torch.no_grad()
def _scale_embeddings(stacks: Stacks, factors: PerStack) -> None:
    """Multiply the embeddings of each stack by its factor, and shared embeddings by the encoder's factor."""
    if not all(isinstance(stack.embed_tokens, nn.Embedding) for stack in stacks.values()):
        raise AdminError("T-Fixup scales one embedding matrix. Leave out --adaptive-input and --character-embeddings.")
    weights = {side: stack.embed_tokens.weight for side, stack in stacks.items()}
    for side, factor in zip(SIDES, factors):
        if side in weights and (side == "encoder" or weights[side] is not weights.get("encoder")):
            weights[side].mul_(factor)


def dt_fixup_weights(stacks: Stacks) -> None:
    """Draw every weight matrix Xavier-uniform. Biases keep fairseq's initial values.

    `dt_fixup_scale` follows when μ is known.

    Xu et al. 2021, section 3. The authors' code (BorealisAI/DT-Fixup) also draws every tensor of two dimensions, but
    from Xavier's normal distribution.
    """
    for layer, *_ in _layers(stacks):
        for linear in linears_of(layer):
            nn.init.xavier_uniform_(linear.weight)


@torch.no_grad()
def dt_fixup_scale(encoder: Stack, largest_norm: float) -> None:
    """Divide values, attention outputs and feed-forward weights of N layers by sqrt(N (4μ² + 2μ + 2)), in place.

    Xu et al. 2021, section 3

    Args:
        encoder: the new layers.
        largest_norm: μ, the largest L2 norm over the channels of any position of their input.
    """
    layers = layers_of(encoder)
    divisor = math.sqrt(len(layers) * (4 * largest_norm**2 + 2 * largest_norm + 2))
    for layer in layers:
        for linear in (layer.self_attn.v_proj, layer.self_attn.out_proj, layer.fc1, layer.fc2):
            linear.weight.div_(divisor)


def fixup_weights(stacks: Stacks) -> None:
    """Set the last weights of each branch to 0, and scale its other weights by L^(-1/(2m-2)).

    Zhang, Dauphin and Ma 2019, rules 1 and 2 (as a summary of the paper gives them). L is the number of branches, and m
    is the number of linear layers in the branch. As in the authors' code, m is 4 in an attention and 2 in a
    feed-forward layer, L counts both stacks, and an output projection is 0 unless it is tied to an embedding. Before
    scaling, the weights are Xavier-uniform, with fairseq's gain of 1/sqrt(2) for queries, keys and values, which that
    code draws as one matrix. For every encoder-attention that code takes L = 12; here L is always the number of
    branches, as in the paper.
    """
    layers = [layer for layer, *_ in _layers(stacks)]
    branches = sum(len(attentions_of(layer)) + 1 for layer in layers)
    for layer in layers:
        for attention in attentions_of(layer):
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
                nn.init.xavier_uniform_(projection.weight, gain=2**-0.5 * branches ** (-1 / 6))
            nn.init.zeros_(attention.out_proj.weight)
        nn.init.xavier_uniform_(layer.fc1.weight, gain=branches ** (-1 / 2))
        nn.init.zeros_(layer.fc2.weight)
    output = getattr(stacks.get("decoder"), "output_projection", None)
    if output is not None and all(
        output.weight is not getattr(stack.embed_tokens, "weight", None) for stack in stacks.values()
    ):
        nn.init.zeros_(output.weight)


def looklinear_weights(stacks: Stacks) -> None:
    """Feed-forward layers that are linear at first: the second half of the units is the negative of the first.

        [V, -V] relu([W, -W] x) = V (relu(Wx) - relu(-Wx)) = V W x

    Balduzzi et al. 2017, looks-linear initialisation. W and V are Xavier-uniform and biases 0, as in the code of Liu et
    al. 2020. The equation also holds for gelu and swish.

    Raises:
        AdminError: a feed-forward layer's width is odd.
    """
    for layer, *_ in _layers(stacks):
        width = layer.fc1.out_features
        if width % 2:
            raise AdminError(f"looklinear needs feed-forward layers of an even width; one is {width} wide.")
        for linear in (layer.fc1, layer.fc2):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
        with torch.no_grad():
            layer.fc1.weight[width // 2 :] = -layer.fc1.weight[: width // 2]
            layer.fc2.weight[:, width // 2 :] = -layer.fc2.weight[:, : width // 2]


def ds_init_weights(stacks: Stacks) -> None:
    """Xavier-uniform with gain 1/sqrt(l) in every weight matrix of layer l.

    Zhang, Titov and Sennrich 2019, depth-scaled initialisation with alpha = 1
    """
    for layer, number, _ in _layers(stacks):
        _draw(layer, nn.init.xavier_uniform_, number**-0.5, number**-0.5)


def ds_init_code_weights(stacks: Stacks) -> None:
    """Xavier-uniform with its variance times 1/sqrt(l), hence gain l^(-1/4); biases are 0.

    The authors' code (bzhangGo/zero) calls variance_scaling_initializer(1/sqrt(l), "fan_avg", "uniform"). It draws
    queries, keys and values of self-attention as one matrix from C to 3C channels, so their gain is 1/sqrt(2) times
    l^(-1/4).
    """
    for layer, number, _ in _layers(stacks):
        _draw(layer, nn.init.xavier_uniform_, number**-0.25, number**-0.25)
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            nn.init.xavier_uniform_(projection.weight, gain=2**-0.5 * number**-0.25)
        for attention in attentions_of(layer):
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
                nn.init.zeros_(projection.bias)


@torch.no_grad()
def b2t_code_weights(stacks: Stacks) -> None:
    """Multiply every weight matrix of a layer by N^(-1/2) in the encoder and by M^(-1/2) in the decoder.

    The authors' code: takase/b2t_connection, rescaling_init
    """
    for layer, _, depth in _layers(stacks, _depths(stacks)):
        for linear in linears_of(layer):
            linear.weight.mul_(depth**-0.5)


WEIGHTS: dict[str, Callable[[Stacks], None]] = {
    "deepnorm": deepnorm_weights,
    "t-fixup": t_fixup_weights,
    "t-fixup-code": partial(t_fixup_weights, code=True),
    "fixup": fixup_weights,
    "b2t-code": b2t_code_weights,
    "looklinear": looklinear_weights,
    "ds-init": ds_init_weights,
    "ds-init-code": ds_init_code_weights,
    "dt-fixup": dt_fixup_weights,
}
"""The schemes that draw initial weights of their own."""


def draw(scheme: str, stacks: Stacks) -> None:
    """Draw the initial weights of a scheme, in place. A scheme that is not in WEIGHTS keeps fairseq's weights.

    Args:
        scheme: its name in `SCHEMES`.
        stacks: the encoder, the decoder or both.

    Raises:
        AdminError: the scheme is T-Fixup and the model is an encoder alone.
    """
    if scheme in WEIGHTS:
        WEIGHTS[scheme](stacks)
