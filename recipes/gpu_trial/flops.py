"""The arithmetic of a training step: floating-point operations of a Transformer's matrix products, and a card's peak.

    B sentences   S source positions each   T target positions   C channels   F of the feed-forward   V words

Products with padding count, too. No operations but matrix products count. A backward has twice the products of its
forward.
"""

from __future__ import annotations

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "V100": 125e12}
"""Products of dense 16-bit matrices a second, by NVIDIA's sheets of the SXM cards; by a part of the device's name."""


def attention(sentences: int, queries: int, keys: int, width: int) -> int:
    """Operations of one attention's forward: queries times keys, and weights times values."""
    return 4 * sentences * queries * keys * width


def training_flops(
    sentences: int, source: int, target: int, *, layers: tuple[int, int], width: int, ffn: int, words: int
) -> int:
    """Operations of a forward and a backward of an encoder-decoder with tied embeddings.

    Args:
        sentences: B.
        source: S.
        target: T.
        layers: number of layers of the encoder, and of the decoder.
        width: C.
        ffn: F.
        words: V.
    """
    rows, target_rows = sentences * source, sentences * target
    feed_forward = 4 * width * ffn
    encoder = rows * (8 * width**2 + feed_forward) + attention(sentences, source, source, width)
    decoder = target_rows * (12 * width**2 + feed_forward) + rows * 4 * width**2
    decoder += attention(sentences, target, target, width) + attention(sentences, target, source, width)
    return 3 * (layers[0] * encoder + layers[1] * decoder + 2 * target_rows * width * words)


def utilisation(flops: float, seconds: float, device: str) -> float | None:
    """Model FLOPs utilisation: the share of the device's peak; None for a device whose peak is not known."""
    peak = next((value for name, value in PEAKS.items() if name in device), None)
    return None if peak is None else flops / seconds / peak
