"""Make the golden table of the schemes' parameters: python tests/golden/schemes.py, from the repository's root.

The table has the name, shape, mean, standard deviation and distribution of every parameter of a freshly initialised
3L-2L model of width 32, for each scheme. It does not use the plugin. Parameters that a scheme leaves to fairseq are
measured on fairseq's `transformer`, Post-LN or Pre-LN, over 100 seeds. Parameters that a scheme draws itself are
computed here from its paper's formula, for these sizes:

    Xavier has the standard deviation sqrt(2 / (in + out)), times its gain
"""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

N, M, WIDTH, FFN, HEADS, SEEDS = 3, 2, 32, 64, 4, 100


def stock(encoder_before, decoder_before):
    """{name: (shape, mean, std, law)} of fairseq's own model."""
    words = Dictionary()
    for word in range(100):
        words.add_symbol(f"w{word}")
    models = []
    for seed in range(SEEDS):
        args = Namespace(share_all_embeddings=True, encoder_layers=N, decoder_layers=M)
        args.encoder_embed_dim, args.encoder_ffn_embed_dim, args.encoder_attention_heads = WIDTH, FFN, HEADS
        args.decoder_attention_heads = HEADS
        args.encoder_normalize_before, args.decoder_normalize_before = encoder_before, decoder_before
        ARCH_CONFIG_REGISTRY["transformer"](args)
        torch.manual_seed(seed)
        task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
        models.append(dict(ARCH_MODEL_REGISTRY["transformer"].build_model(args, task).named_parameters()))
    laws = {}
    for name, parameter in models[0].items():
        values = torch.stack([model[name].detach().double() for model in models])
        mean, std = values.mean().item(), values.std(correction=0).item()
        law = "constant" if std == 0 else "normal" if "embed_tokens" in name else "uniform"
        laws[name] = ("x".join(map(str, parameter.shape)), mean, std, law)
    return laws


def xavier(laws, law, gain):
    """Weights by Xavier with gain(stack, layer, kind), kind one of q, k, v, out, fc; no feed-forward biases."""
    laws = dict(laws)
    for name, (shape, *_) in laws.items():
        kind = name.split(".")[-2].split("_")[0].rstrip("12")
        if ".layers." in name and kind in ("q", "k", "v", "out", "fc") and name.endswith("weight"):
            out_size, in_size = map(int, shape.split("x"))
            stack, _, layer = name.split(".")[:3]
            laws[name] = (shape, 0.0, gain(stack, int(layer), kind) * math.sqrt(2 / (in_size + out_size)), law)
        elif ".fc" in name:
            laws[name] = (shape, 0.0, 0.0, "constant")
    return laws


def only_fc(laws, changed):
    return {name: changed[name] if ".fc" in name else law for name, law in laws.items()}


def without_norms(laws):
    return {name: law for name, law in laws.items() if "layer_norm" not in name}


def with_branch_scale(laws):
    scales = {f"encoder.layers.{i}.branch_scale" for i in range(N)}
    scales |= {f"decoder.layers.{i}.branch_scale" for i in range(M)}
    return {**laws, **{name: ("1", 0.0, 0.0, "constant") for name in sorted(scales)}}


def deepnorm_gain(stack, layer, kind):
    if kind in ("q", "k"):
        return 1.0
    # encoder: 0.87 (3^4 * 2)^(-1/16) = 0.87 * 162^(-0.0625) = 0.6330; decoder: (12 * 2)^(-1/4) = 0.4518
    return 0.87 * (N * N * N * N * M) ** -0.0625 if stack == "encoder" else (12 * M) ** -0.25


def t_fixup_gain(stack, layer, kind):
    if kind in ("q", "k"):
        return 1.0
    # encoder: 0.67 * 3^(-1/4) = 0.5091; decoder: (9 * 2)^(-1/4) = 0.4855
    return 0.67 * N**-0.25 if stack == "encoder" else (9 * M) ** -0.25


def t_fixup(laws):
    laws = without_norms(xavier(laws, "uniform", t_fixup_gain))
    shape, mean, std, law = laws["encoder.embed_tokens.weight"]
    scale = (9 * M) ** -0.25
    return {**laws, "encoder.embed_tokens.weight": (shape, scale * mean, scale * std, law)}


def t_fixup_code(laws):
    """As in the authors' code: queries and keys are scaled by 1/sqrt(2).

    The shared embedding is scaled by (9N)^(-1/4) = 27^(-1/4) = 0.4387.
    """
    embedding = laws["encoder.embed_tokens.weight"]
    laws = without_norms(
        xavier(laws, "uniform", lambda stack, _, kind: 2**-0.5 if kind in ("q", "k") else t_fixup_gain(stack, _, kind))
    )
    shape, mean, std, law = embedding
    return {**laws, "encoder.embed_tokens.weight": (shape, (9 * N) ** -0.25 * mean, (9 * N) ** -0.25 * std, law)}


def b2t_code(laws):
    """Multiply every matrix of a layer by 1 / sqrt(number of layers in its stack): 3^(-1/2) and 2^(-1/2)."""
    roots = {"encoder": N**-0.5, "decoder": M**-0.5}
    return {
        name: (shape, mean, std * roots[name.split(".")[0]], law)
        if ".layers." in name and name.endswith("weight") and "layer_norm" not in name
        else (shape, mean, std, law)
        for name, (shape, mean, std, law) in laws.items()
    }


def ds_init_code(laws):
    """As in the authors' code: variance times 1/sqrt(l); self-attention's q, k, v as one C x 3C matrix; no biases."""

    def gain(stack, layer, kind):
        return (layer + 1) ** -0.25

    drawn = xavier(laws, "uniform", gain)
    for name, (shape, mean, std, law) in drawn.items():
        if "_attn." in name and name.endswith("proj.bias"):
            drawn[name] = (shape, 0.0, 0.0, "constant")
        elif "self_attn." in name and name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):
            drawn[name] = (shape, mean, std / math.sqrt(2), law)
    return drawn


def with_norms(laws, modules, layers=True):
    """Add a norm (weight 1, bias 0) to the given modules of every layer, or to the end of both stacks."""
    norms = {}
    for stack, count in (("encoder", N), ("decoder", M)):
        places = [f"{stack}.layers.{i}.{module}" for i in range(count) for module in modules] if layers else []
        for place in places or [f"{stack}.layer_norm"]:
            if stack == "decoder" or ".encoder_attn" not in place:
                norms[f"{place}.weight"] = (str(WIDTH), 1.0, 0.0, "constant")
                norms[f"{place}.bias"] = (str(WIDTH), 0.0, 0.0, "constant")
    return {**laws, **norms}


def fixup(laws):
    """Scalars replace norms and bias vectors. An encoder layer counts 2 branches, a decoder layer 3."""
    branches = 2 * N + 3 * M
    laws = xavier(laws, "uniform", lambda stack, layer, kind: branches**-0.5 if kind == "fc" else branches ** (-1 / 6))
    result = {}
    for name, (shape, mean, std, law) in laws.items():
        if ".layers." in name and name.endswith("weight") and "layer_norm" not in name:
            if "out_proj" in name or "fc2" in name:
                mean, std, law = 0.0, 0.0, "constant"
            elif "fc1" not in name:
                std /= math.sqrt(2)  # in the authors' code, queries, keys and values are one 3C x C matrix
            result[name] = (shape, mean, std, law)
        elif ".layers." not in name:
            result[name] = (shape, mean, std, law)
    zero, one = ("1", 0.0, 0.0, "constant"), ("1", 1.0, 0.0, "constant")
    for stack, layers, attentions in (("encoder", N, ["self"]), ("decoder", M, ["self", "encoder"])):
        for layer in (f"{stack}.layers.{i}" for i in range(layers)):
            result.update({f"{layer}.{attention}_attn_layer_norm.bias": zero for attention in attentions})
            result.update({f"{layer}.final_layer_norm.bias": zero, f"{layer}.fc1.output_bias": zero})
            for last in [f"{attention}_attn" for attention in attentions] + ["fc2"]:
                result.update({f"{layer}.{last}.input_bias": zero, f"{layer}.{last}.branch_multiplier": one})
        result[f"{stack}.layer_norm.bias"] = zero
    return {**result, "encoder.layer_norm.multiplier": one}


post, pre, hybrid = stock(False, False), stock(True, True), stock(False, True)
assert "fairseq_admin" not in sys.modules
plain_xavier = xavier(post, "uniform", lambda stack, layer, kind: 1.0)
SCHEMES = {
    "admin": only_fc(post, plain_xavier),
    "post-ln": post,
    "pre-ln": pre,
    "post-ln-pre-ln": hybrid,
    "deepnorm": xavier(post, "normal", deepnorm_gain),
    "rezero": with_branch_scale(without_norms(post)),
    "rezero-post-ln": with_branch_scale(post),
    "t-fixup": t_fixup(post),
    "t-fixup-code": t_fixup_code(post),
    "fixup": fixup(post),
    "b2t": post,
    "b2t-code": b2t_code(post),
    "looklinear": only_fc(post, plain_xavier),
    "ds-init": xavier(post, "uniform", lambda stack, layer, kind: (layer + 1) ** -0.5),
    "ds-init-code": ds_init_code(post),
    "residual": with_norms(post, [], layers=False),
    "peri-ln": with_norms(pre, [f"{last}.output_norm" for last in ("self_attn", "encoder_attn", "fc2")]),
    "keel": with_norms(post, [f"{first}.input_norm" for first in ("self_attn", "encoder_attn", "fc1")]),
}
with open(Path(__file__).parent / "schemes.tsv", "w") as out:
    print("scheme", "name", "shape", "mean", "std", "law", sep="\t", file=out)
    for scheme, laws in SCHEMES.items():
        for name, (shape, mean, std, law) in laws.items():
            print(scheme, name, shape, f"{mean:.6g}", f"{std:.6g}", law, sep="\t", file=out)
