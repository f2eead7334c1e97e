"""Make the golden tables of ω with the profiling stage of the authors' code (see clinic.py). From the folder tests:

    python -m golden.omega TRANSFORMER_CLINIC

    omega.tsv         ω of small models, without dropout. No weights are stored: a formula gives every parameter and the
                      batch, to their model here and to ours in the test.
    omega_fresh.tsv   ω of freshly initialised models, IWSLT'14's 6L-6L: mean and standard deviation over seeds.

B batch   T time
"""

from __future__ import annotations

import math
import sys
import zlib
from pathlib import Path

import numpy
import torch
from golden import clinic
from torch import Tensor, nn

TABLE = Path(__file__).with_name("omega.tsv")
FRESH_TABLE = Path(__file__).with_name("omega_fresh.tsv")
CASES = {
    "3L-3L": (3, 3, 64, 128, 4),
    "6L-2L": (6, 2, 32, 64, 2),
    "18L-18L": (18, 18, 32, 64, 4),
    "2L-3L padded": (2, 3, 32, 64, 4),
}
"""Encoder layers, decoder layers, width, feed-forward width, heads."""
PAD, END = 1, 2
"""fairseq's indices of padding and of the end of a sentence."""
DROPOUTS = {"no dropout": (0.0, 0.0), "dropout": (0.3, 0.1)}
"""Dropout rates of the fresh models: after a branch; on attention weights and within the feed-forward."""
SEEDS = 40


def sizes(case: str) -> dict[str, int]:
    """fairseq's options for a case."""
    encoder_layers, decoder_layers, width, ffn, heads = CASES[case]
    each = {"embed_dim": width, "ffn_embed_dim": ffn, "attention_heads": heads}
    both = {f"{side}_{option}": value for side in ("encoder", "decoder") for option, value in each.items()}
    return {"encoder_layers": encoder_layers, "decoder_layers": decoder_layers, **both}


def numbers(name: str, count: int) -> numpy.ndarray:
    """Uniform numbers in [0, 1), seeded by name. They come from raw bits, which numpy keeps stable."""
    return numpy.random.Philox(key=zlib.crc32(name.encode())).random_raw(count) / 2.0**64


def value(name: str, shape: tuple[int, ...]) -> Tensor:
    """A parameter's float32 value, from its name: Xavier-uniform matrices, norms near 1, biases near 0, padding 0."""
    centred = torch.from_numpy(2 * numbers(name, math.prod(shape)) - 1).view(shape)
    if "embed_tokens" in name:
        centred[PAD] = 0
    if len(shape) == 2:
        return (math.sqrt(6 / sum(shape)) * centred).float()
    return (float(name.endswith("norm.weight")) + 0.1 * centred).float()


def batch(padded: bool = False) -> tuple[Tensor, Tensor]:
    """Source tokens (B, T_source) and decoder input (B, T_target).

    With `padded`, sentence b is b % 4 tokens shorter: sources are padded on the left, targets on the right.
    """
    src, prev = (
        torch.from_numpy(4 + (clinic.WORDS * numbers(name, 16 * length)).astype("int64")).view(16, length)
        for name, length in (("source", 13), ("target", 11))
    )
    src[:, -1] = prev[:, 0] = END
    for b in range(len(src) if padded else 0):
        src[b, : b % 4] = PAD
        prev[b, prev.size(1) - b % 4 :] = PAD
    return src, prev


def profiled(model: nn.Module, src: Tensor, prev: Tensor) -> dict[str, float]:
    """ω from the authors' code: it profiles in a fresh model's first forward in training mode."""
    with torch.no_grad():
        model(src, src.ne(PAD).sum(1), prev)
    return clinic.omegas(model)


def main(checkout: Path) -> None:
    clinic.enter(checkout)
    admin = "--init-type=adaptive-profiling"
    rows = ["case\tnorm\tomega"]
    for case in CASES:
        options = [f"--{option.replace('_', '-')}={size}" for option, size in sizes(case).items()]
        model = clinic.build("--arch=transformer", admin, "--dropout=0", *options)
        for name, parameter in clinic.parameters(model).items():
            parameter.copy_(value(name, tuple(parameter.shape)))
        omega = profiled(model, *batch("padded" in case))
        rows += [f"{case}\t{norm}\t{one:.9g}" for norm, one in omega.items()]
    TABLE.write_text("\n".join(rows) + "\n")

    rows = ["case\tnorm\tmean\tstd"]
    for case, (dropout, within) in DROPOUTS.items():
        rates = [f"--dropout={dropout}", f"--attention-dropout={within}", f"--activation-dropout={within}"]
        draws = []
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            draws.append(profiled(clinic.build("--arch=transformer_iwslt_de_en", admin, *rates), *batch()))
        for norm in draws[0]:
            of_norm = torch.tensor([draw[norm] for draw in draws], dtype=torch.float64)
            rows.append(f"{case}\t{norm}\t{of_norm.mean():.6f}\t{of_norm.std():.6f}")
    FRESH_TABLE.write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
