"""How much memory training a Transformer takes, from its sizes.

Legend: d width, f feed-forward width, h heads, S units of the longest sentence of a batch, V words, a bytes of an
activation, m bytes a value of a dropout mask. What each operation of fairseq's layers keeps for its backward pass is
counted below; tests/test_memory.py counts the tensors that autograd saves and compares. Only the standard library is
used: a plan can be printed before anything is installed.
"""

from __future__ import annotations

from dataclasses import dataclass

GB = 1e9
CONTEXT = 1.0 * GB
"""Bytes of a GPU that no tensor gets: the CUDA context, the libraries' work space, NCCL's buffers."""
LIBRARIES = 0.02 * GB
"""Bytes of a CPU's memory that go to what torch and fairseq load and cache with the first update."""
SPARE = 0.05
"""Share of the tensors' bytes that torch's allocator loses between blocks."""
POSITIONS = 1026
"""Rows of a table of positions: fairseq's Transformer takes up to 1,024 units, and there are two more."""
CHUNK = 2**24
STEP = 16
"""Elements that RAdam updates at once (fairseq_admin/radam.py), and the bytes an element that it takes meanwhile."""


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
    """A model's sizes, and where it trains. Without encoder layers it is a language model."""

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
    gpu: bool = True

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


def attention_bytes(sizes: Sizes, length: int, *, decoder: bool, cross: bool) -> float:
    """What one attention keeps, in bytes a token of its queries."""
    d, h, a = sizes.width, sizes.heads, sizes.type.activation
    mask = 1 if sizes.gpu else a
    # q, k, v, and what the output projection takes.
    kept = 4 * d * a
    if cross:
        # fairseq's own code: softmax in fp32, its half copy if it is not that itself, dropout's mask and result.
        matrices = 4.0 if not sizes.attention_dropout else 4 + mask + a
        if a < 4 and not sizes.attention_dropout:
            matrices += a
    elif sizes.gpu or not sizes.attention_dropout:
        # One kernel of torch's: a sum a head, on a GPU a copy of the result in another order, and in the decoder a mask
        # for each head (padding and future in one).
        kept += 4 * h + (d * a if sizes.gpu else 0)
        matrices = float(a) if decoder else 0.0
    else:
        matrices = 3.0 * a
    return kept + matrices * h * length


def layer_bytes(sizes: Sizes, length: int, *, decoder: bool) -> float:
    """What one layer keeps for backward, in bytes a token, the layer's input among it."""
    d, kind = sizes.width, sizes.type
    a, n = kind.activation, kind.norm
    mask = 1 if sizes.gpu else a
    cross = decoder and bool(sizes.encoder_layers)
    sublayers = 3 if cross else 2
    # Of each sub-layer the sum that its norm takes, mean and deviation in fp32, and the input, which its shortcut and
    # its first product take.
    kept: float = sublayers * (2 * d * n + 8)
    # Under autocast each product that takes a norm's output has a half copy of its own.
    kept += (7 if cross else 4) * d * a if n != a else 0
    kept += attention_bytes(sizes, length, decoder=decoder, cross=False)
    kept += attention_bytes(sizes, length, decoder=decoder, cross=True) if cross else 0
    kept += sublayers * d * mask if sizes.dropout else 0
    kept += sizes.ffn * (2 * a + mask if sizes.activation_dropout else a)
    return kept


def gigabytes(count: float) -> str:
    """For people: as many digits as matter."""
    return f"{count / GB:.{1 if count >= GB else 2}f}"


@dataclass(frozen=True)
class Need:
    """Bytes of each part, and of all at the peak."""

    static: float
    activations: float
    loss: float
    step: float
    reserve: float

    @property
    def peak(self) -> float:
        """The loss's gradient is there while all activations are; the optimizer's step follows when they are gone."""
        return self.static + max(self.activations + self.loss, self.step) + self.reserve

    def __str__(self) -> str:
        parts = {"weights, gradients, moments": self.static}
        if self.step > self.activations + self.loss:
            parts["the optimizer's step"] = self.step
        else:
            parts |= {"activations": self.activations, "logits and loss": self.loss}
        parts["reserve"] = self.reserve
        return f"{gigabytes(self.peak)} GB ({', '.join(f'{name} {gigabytes(part)}' for name, part in parts.items())})"


def activation_bytes(sizes: Sizes, tokens: int, length: int) -> float:
    """What all layers keep at the end of the forward pass; the loss comes on top."""
    layers = ((sizes.encoder_layers, False), (sizes.decoder_layers, True))
    each = [(count, layer_bytes(sizes, length, decoder=decoder)) for count, decoder in layers if count]
    if sizes.checkpoint:
        # Of each layer its input, and one layer at a time again.
        inputs = sum(count * sizes.width * sizes.type.norm for count, _ in each)
        kept = inputs + max(size for _, size in each)
    else:
        # A stack's first layer keeps its input in the order of sentences, too, and the encoder's output is there twice.
        kept = sum(count * size for count, size in each) + 2 * len(each) * sizes.width * sizes.type.activation
    # Of each stack the embedding's dropout; and the last layer's output, which the logits come from.
    mask = 1 if sizes.gpu else sizes.type.activation
    kept += len(each) * sizes.width * ((mask if sizes.dropout else 0) + sizes.type.activation)
    return tokens * kept


def need(sizes: Sizes, tokens: int, *, length: int = 256, accumulate: bool = False, devices: int = 1) -> Need:
    """What training takes of one device.

    Args:
        tokens: of a batch, padding and all, of either side.
        length: units of its sentences.
        accumulate: whether an update has several batches: the gradients of the first are there when the next comes.
        devices: how many hold the model; several exchange gradients through a second copy of them.
    """
    kind, parameters = sizes.type, sizes.parameters
    exchanged = parameters * kind.gradients if devices > 1 else 0
    positions = 4.0 * POSITIONS * sizes.width * (2 if sizes.encoder_layers else 1)
    held = parameters * (kind.weights + kind.kept) + positions + exchanged
    gradients = parameters * kind.gradients
    static = held + (gradients if accumulate else 0)
    activations = activation_bytes(sizes, tokens, length)
    # The logarithms in fp32 are kept; their gradient is the sum of two, in fp32 as well.
    loss = 12.0 * tokens * sizes.words
    # The embeddings are the largest parameter; smaller ones are updated together on a GPU.
    largest = sizes.words * sizes.width
    updated = min(parameters, max(CHUNK, largest)) if sizes.gpu else largest
    step = (0 if accumulate else gradients) + STEP * updated
    reserve = CONTEXT + SPARE * (static + max(activations + loss, step)) if sizes.gpu else LIBRARIES
    return Need(static, activations, loss, step, reserve)
