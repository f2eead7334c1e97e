"""The distribution of every parameter of a freshly initialised model, for each scheme. It does not use the plugin.

Parameters that a scheme leaves to fairseq are measured on fairseq's own model, Post-LN or Pre-LN. Parameters that a
scheme draws itself are computed here from its paper's formula:

    Xavier has the standard deviation sqrt(2 / (in + out)), times its gain

N encoder layers   M decoder layers
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

LINEAR = re.compile(r"(encoder|decoder)\..*layers\.(\d+)\.(?:\w+_attn\.)?(q|k|v|out|fc)(?:_proj|\d)\.(weight|bias)")
"""The name of a linear layer's parameter: its stack, its layer, and the part of that layer."""
PARTS = ("q", "k", "v", "out", "fc")
SEEDS = 40
"""Number of fairseq's own models that are measured."""


class Law(NamedTuple):
    shape: tuple[int, ...]
    mean: float
    std: float
    kind: str
    """ "constant", "uniform" or "normal"."""


Laws = dict[str, Law]
ZERO, ONE = Law((1,), 0.0, 0.0, "constant"), Law((1,), 1.0, 0.0, "constant")


def measured(values: Tensor) -> Law:
    """The law of a parameter, from its values over several seeds. Shape (seeds, ...)."""
    std = values.std(correction=0).item()
    # Uniform values stay within sqrt(3) standard deviations; of 320 normal values, some exceed two.
    kind = "constant" if std == 0 else "uniform" if values.abs().max() < 2 * std else "normal"
    return Law(tuple(values.shape[1:]), values.mean().item(), std, kind)


def assert_law(values: Tensor, law: Law, name: str, seeds: int = SEEDS) -> None:
    """Check a parameter's values over ten seeds, of shape (10, ...), against a law that was measured over `seeds`."""
    ours = measured(values)
    assert (ours.shape, ours.kind) == (law.shape, law.kind), name
    independent = values.numel() / (2 if "looklinear" in name and ".fc" in name else 1)  # its halves repeat each other
    error = 6 * law.std * math.sqrt((1 + 10 / seeds) / independent)
    assert abs(ours.mean - law.mean) <= error and abs(ours.std - law.std) <= error / math.sqrt(2), (name, ours, law)


def xavier(
    laws: Laws, gain: Callable[[str, int, str], float], kind: str = "uniform", parts: tuple[str, ...] = PARTS
) -> Laws:
    """Draw weights by Xavier with gain(stack, layer, part), and set feed-forward biases to 0, in the given parts."""
    drawn = dict(laws)
    for name, law in laws.items():
        match = LINEAR.fullmatch(name)
        if match and match[3] in parts:
            stack, layer, part, tensor = match.groups()
            if tensor == "weight":
                std = gain(stack, int(layer), part) * math.sqrt(2 / sum(law.shape))
                drawn[name] = law._replace(mean=0.0, std=std, kind=kind)
            elif part == "fc":
                drawn[name] = law._replace(mean=0.0, std=0.0, kind="constant")
    return drawn


def layers_of(laws: Laws, stack: str = "") -> list[str]:
    """The names of all layers, or of one stack's."""
    matches = (re.match(rf"({stack}.*layers\.\d+)\.", name) for name in laws)
    return sorted({match[1] for match in matches if match})


def without_norms(laws: Laws) -> Laws:
    return {name: law for name, law in laws.items() if "layer_norm" not in name}


def with_branch_scale(laws: Laws) -> Laws:
    return {**laws, **{f"{layer}.branch_scale": ZERO for layer in layers_of(laws)}}


def with_norms(laws: Laws, places: list[str]) -> Laws:
    """Add norms with weight 1 and bias 0. They are as wide as the model."""
    width = laws["encoder.layers.0.self_attn.out_proj.bias"].shape
    norms = {f"{place}.weight": ONE._replace(shape=width) for place in places}
    return {**laws, **norms, **{f"{place}.bias": ZERO._replace(shape=width) for place in places}}


def branch_norms(laws: Laws, norm: str, ffn: str) -> Laws:
    """Add a norm to every attention, and to one layer of every feed-forward."""
    places = {re.sub(r"(_attn)\..*", r"\1", name) for name in laws if "_attn." in name}
    return with_norms(laws, [f"{place}.{norm}" for place in [*places, *(f"{it}.{ffn}" for it in layers_of(laws))]])


def deepnorm(laws: Laws) -> Laws:
    """For N = 3, M = 2: encoder 0.87 · 162^(-1/16) = 0.6330, decoder 24^(-1/4) = 0.4518. One stack: (8L)^(-1/4)."""
    n, m = (len(layers_of(laws, stack)) for stack in ("encoder", "decoder"))
    both = {"encoder": 0.87 * (n * n * n * n * m) ** -0.0625, "decoder": (12 * m) ** -0.25} if n and m else {}
    alone = (8 * (n + m)) ** -0.25
    return xavier(laws, lambda stack, _, part: 1.0 if part in ("q", "k") else both.get(stack, alone), "normal")


def t_fixup(laws: Laws) -> Laws:
    """For N = 3, M = 2: encoder 0.67 · 3^(-1/4) = 0.5091, decoder and embeddings 18^(-1/4) = 0.4855. Queries: 1."""
    n, m = (len(layers_of(laws, stack)) for stack in ("encoder", "decoder"))
    gains = {"encoder": 0.67 * n**-0.25 if n else 0.0, "decoder": (9 * m) ** -0.25}
    drawn = without_norms(xavier(laws, lambda stack, _, part: 1.0 if part in ("q", "k") else gains[stack]))
    for name, law in drawn.items():
        if name.endswith("embed_tokens.weight"):
            drawn[name] = law._replace(mean=gains["decoder"] * law.mean, std=gains["decoder"] * law.std)
    return drawn


def fixup(laws: Laws) -> Laws:
    """Scalars replace norms and bias vectors. An encoder layer counts 2 branches, a decoder layer 3."""
    lasts = [name for name in laws if re.search(r"layers.*\.(out_proj|fc2)\.weight$", name)]
    gains = {"fc": len(lasts) ** -0.5, "out": 0.0}
    # In the authors' code, queries, keys and values are one 3C x C matrix.
    queries = len(lasts) ** (-1 / 6) / math.sqrt(2)
    result: Laws = {}
    for name, law in without_norms(xavier(laws, lambda stack, layer, part: gains.get(part, queries))).items():
        if ".layers." not in name or name.endswith("weight"):
            result[name] = law._replace(std=0.0, kind="constant") if name in lasts else law
    for name in lasts:
        branch = name.removesuffix(".weight").removesuffix(".out_proj")
        result |= {f"{branch}.input_bias": ZERO, f"{branch}.branch_multiplier": ONE}
        result[f"{branch.replace('fc2', 'final')}_layer_norm.bias"] = ZERO
    result |= {f"{layer}.fc1.output_bias": ZERO for layer in layers_of(laws)}
    result |= {f"{stack}.layer_norm.bias": ZERO for stack in ("encoder", "decoder")}
    return {**result, "encoder.layer_norm.multiplier": ONE}


def expected(scheme: str, stock: dict[str, Laws], ffn: str | None = None) -> Laws:
    """The law of every parameter.

    Args:
        scheme: its name.
        stock: the laws of fairseq's own models, by the scheme that they compute.
        ffn: --admin-ffn-init. None: the scheme's own.
    """
    post, pre = stock["post-ln"], stock["pre-ln"]
    if ffn == "xavier" or (ffn is None and scheme in ("admin", "looklinear")):
        post = xavier(post, lambda stack, layer, part: 1.0, parts=("fc",))
    schemes: dict[str, Callable[[], Laws]] = {
        "pre-ln": lambda: pre,
        "pre-ln-by-depth": lambda: pre,
        "post-ln-pre-ln": lambda: stock["post-ln-pre-ln"],
        "deepnorm": lambda: deepnorm(post),
        "rezero": lambda: with_branch_scale(without_norms(post)),
        "rezero-post-ln": lambda: with_branch_scale(post),
        "t-fixup": lambda: t_fixup(post),
        "fixup": lambda: fixup(post),
        "ds-init": lambda: xavier(post, lambda stack, layer, part: (layer + 1) ** -0.5),
        "residual": lambda: with_norms(post, ["encoder.layer_norm", "decoder.layer_norm"]),
        "peri-ln": lambda: branch_norms(pre, "output_norm", "fc2"),
        "keel": lambda: branch_norms(post, "input_norm", "fc1"),
    }
    return schemes.get(scheme, lambda: post)()
