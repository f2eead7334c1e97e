"""What a Transformer's layers keep for the backward pass, from its sizes.

Legend: d width, f feed-forward width, h heads, a bytes of an activation.
What each operation keeps is counted below, in fairseq's layers and in the fast ones (fairseq_admin/fast/), which differ
in the rows of `LAYERS`; tests/test_memory.py counts the tensors that autograd saves and compares.

That is of a CPU. Of a GPU it is assumed, and not measured, that scaled_dot_product_attention takes its flash or its
memory-efficient kernel, with dropout too: neither keeps a probability, only a sum for each head and position in fp32.
For the heads' order in memory it may keep its result twice. Masks take a byte a value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from recipes.steps.plugin import SCHEMES


@dataclass(frozen=True)
class Precision:
    """Bytes a parameter, and of an activation.

    Attributes:
        weights: the weights the forward pass reads, and copies of them in another type.
        gradients: what backward fills, and fairseq drops before the next update's first batch.
        kept: what stays from update to update: fp32 weights, their gradients, the two moments of Adam or RAdam.
        activation: what a matrix product returns.
        norm: what a layer norm takes and returns.
    """

    weights: int
    gradients: int
    kept: int
    activation: int
    norm: int


PRECISIONS = {
    "fp32": Precision(weights=4, gradients=4, kept=8, activation=4, norm=4),
    # fairseq's optimizer also holds weights and gradients in fp32, flat or one by one.
    "fp16": Precision(weights=2, gradients=2, kept=16, activation=2, norm=2),
    "bf16": Precision(weights=2, gradients=2, kept=16, activation=2, norm=2),
    # Neither is held: the optimizer casts what it updates.
    "me-fp16": Precision(weights=2, gradients=2, kept=8, activation=2, norm=2),
    # autocast keeps a half copy of each weight; norms stay in fp32.
    "amp": Precision(weights=6, gradients=4, kept=8, activation=2, norm=4),
}


@dataclass(frozen=True)
class Sizes:
    """A model's sizes, and where and how it trains. Without encoder layers it is a language model.

    Attributes:
        checkpoint: whether activations are computed twice.
        layers, loss: which code computes them, a row of `LAYERS` and of `LOSSES`.
    """

    encoder_layers: int = 6
    decoder_layers: int = 6
    width: int = 512
    ffn: int = 2048
    heads: int = 8
    words: int = 32768
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    precision: str = "fp16"
    checkpoint: bool = False
    scheme: str = "admin"
    layers: str = "fast"
    loss: str = "fast"
    gpu: bool = True

    @property
    def mask(self) -> int:
        """Bytes a value of a mask of dropout."""
        return 1 if self.gpu else LAYERS[self.layers].mask

    @property
    def type(self) -> Precision:
        return PRECISIONS[self.precision]

    @property
    def parameters(self) -> int:
        """Weights of a model whose embeddings are one matrix; ω, and what is frozen of it, counts as one vector."""
        d = self.width
        attention, norm = 4 * d * (d + 1), 3 * d
        feed_forward = 2 * d * self.ffn + self.ffn + d
        encoder = attention + feed_forward + 2 * norm
        decoder = attention + feed_forward + 2 * norm + (attention + norm if self.encoder_layers else 0)
        return self.encoder_layers * encoder + self.decoder_layers * decoder + self.words * d


class Batch(NamedTuple):
    """A batch as it is computed: sentences, and units of the longest on either side, to which all are padded."""

    sentences: float
    source: int
    target: int

    @classmethod
    def full(cls, tokens: float, length: int) -> Batch:
        """Of so many tokens on either side, as no batch has more."""
        return cls(tokens / length, length, length)

    @property
    def targets(self) -> float:
        """Tokens of the target side."""
        return self.sentences * self.target


class Scores(NamedTuple):
    """What one attention keeps, of its scores above all.

    Attributes:
        bytes: for each head and pair of positions.
        kernel: whether torch's kernel computes it, which keeps their sum instead.
    """

    bytes: float
    kernel: bool


def plain_scores(sizes: Sizes, keys: int, decoder: bool, cross: bool) -> Scores:
    a, dropped = sizes.type.activation, bool(sizes.attention_dropout)
    if cross:
        # fairseq's own code: softmax in fp32; its half copy, if it is not that itself, or dropout's mask and result.
        return Scores(4.0 + (sizes.mask + a if dropped else a if a < 4 else 0), kernel=False)
    if sizes.gpu or not dropped:
        # In the decoder a mask for each head: padding and future in one.
        return Scores(float(a) if decoder else 0.0, kernel=True)
    return Scores(3.0 * a, kernel=False)


def fast_scores(sizes: Sizes, keys: int, decoder: bool, cross: bool) -> Scores:
    a = sizes.type.activation
    if sizes.gpu:
        return Scores(0.0, kernel=True)
    return Scores(2.0 * a + sizes.mask if sizes.attention_dropout else float(a), kernel=False)


@dataclass(frozen=True)
class Layers:
    """What one implementation of the layers keeps, where they differ.

    Attributes:
        scores: of an attention.
        mask: bytes a value of a mask of dropout on a CPU.
        activations: f values in a feed-forward layer with activation dropout, and masks of f values.
        casts: half copies of d values under autocast: of self-attention, encoder-attention and feed-forward layer.
        unordered: copies of d values, in the sentences' order, at the bottom of each stack; in each sub-layer that has
            no norm to bring them in the layers' order, one.
        packed: whether a GPU keeps copies of the weights of self-attention's three projections, and of the two of the
            encoder's output, next to each other.
        row: to how many keys a CPU fills up fewer.
    """

    scores: Callable[[Sizes, int, bool, bool], Scores]
    mask: int
    activations: tuple[int, int]
    casts: tuple[int, int, int]
    unordered: int
    packed: bool = False
    row: int = 0


LAYERS = {
    # Each product that takes a norm's output casts it for itself. relu keeps its result, dropout its own and a mask.
    "plain": Layers(plain_scores, mask=4, activations=(2, 1), casts=(3, 3, 1), unordered=2),
    "fast": Layers(fast_scores, mask=1, activations=(2, 1), casts=(3, 3, 1), unordered=0, packed=True, row=16),
}


def attention_bytes(sizes: Sizes, queries: int, keys: int, *, decoder: bool, cross: bool) -> float:
    """What one attention keeps of a sentence of so many queries and keys."""
    d, h, a = sizes.width, sizes.heads, sizes.type.activation
    scores = LAYERS[sizes.layers].scores(sizes, keys, decoder, cross)
    filled = keys if sizes.gpu else max(keys, LAYERS[sizes.layers].row)
    # q, k, v, and what the output projection takes.
    kept = 2 * (queries + filled) * d * a + scores.bytes * h * queries * filled
    # A sum a head, and on a GPU a copy of the result in another order.
    return kept + queries * (4 * h + (d * a if sizes.gpu else 0) if scores.kernel else 0)


def token_bytes(sizes: Sizes, *, decoder: bool) -> float:
    """What one layer keeps of a token besides attention, the layer's input among it."""
    d, kind, row, scheme = sizes.width, sizes.type, LAYERS[sizes.layers], SCHEMES[sizes.scheme]
    a, n = kind.activation, kind.norm
    cross = decoder and bool(sizes.encoder_layers)
    sublayers = 3 if cross else 2
    # Of each sub-layer the input, which its shortcut and its first product take.
    kept: float = sublayers * d * n
    # The sum that its norm takes, mean and deviation in fp32.
    normed = scheme.norm[decoder] != "none"
    kept += sublayers * (d * n + 8 if normed else d * n if row.unordered else 0)
    # The same of the second norm of a branch.
    kept += sublayers * (d * n + 8) if scheme.branch_norm else 0
    # The second stream comes with the first as one tensor, of which the layer takes its own.
    kept += d * n if scheme.second_stream else 0
    # A branch that is multiplied by a trained number.
    kept += sublayers * d * a if scheme.branch or scheme.fixup else 0
    if n != a:
        of_self, of_cross, of_feed_forward = row.casts
        kept += (of_self + of_feed_forward + (of_cross if cross else 0)) * d * a
    kept += sublayers * d * sizes.mask if sizes.dropout else 0
    values, masks = row.activations if sizes.activation_dropout else (1, 0)
    return kept + sizes.ffn * (values * a + masks * sizes.mask)


def layer_bytes(sizes: Sizes, batch: Batch, *, decoder: bool) -> float:
    """What one layer keeps for backward of a batch."""
    own, cross = batch.target if decoder else batch.source, decoder and bool(sizes.encoder_layers)
    kept = own * token_bytes(sizes, decoder=decoder)
    kept += attention_bytes(sizes, own, own, decoder=decoder, cross=False)
    if cross:
        kept += attention_bytes(sizes, own, batch.source, decoder=True, cross=True)
    packed = LAYERS[sizes.layers].packed and sizes.gpu
    weights = (5 if cross else 3) * sizes.width**2 * sizes.type.activation if packed else 0
    return batch.sentences * kept + weights


def activation_bytes(sizes: Sizes, batch: Batch) -> float:
    """What all layers keep at the end of the forward pass; the loss comes on top."""
    kept, most = 0.0, 0.0
    for count, own, decoder in (
        (sizes.encoder_layers, batch.source, False),
        (sizes.decoder_layers, batch.target, True),
    ):
        if not count:
            continue
        tokens, layer = batch.sentences * own, layer_bytes(sizes, batch, decoder=decoder)
        # The embedding's dropout; and the last layer's output, which the decoder or the logits are made from.
        kept += tokens * sizes.width * ((sizes.mask if sizes.dropout else 0) + sizes.type.activation)
        if sizes.checkpoint:
            # Of each layer its input, and one layer at a time again.
            kept += count * tokens * sizes.width * sizes.type.norm
            most = max(most, layer)
        else:
            kept += count * layer + LAYERS[sizes.layers].unordered * tokens * sizes.width * sizes.type.activation
    return kept + most
