"""Makes the golden tables of parameters: python tests/golden/parameters.py, from the repository's root.

Names, shapes, means and standard deviations of every parameter of fairseq's own `transformer`, freshly initialised,
over 20 seeds; without the plugin. fc1 and fc2 alone are replaced by the initialisation of the fairseq under the paper:
Xavier-uniform weights, whose standard deviation is sqrt(2 / (in + out)), and zero biases.
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

SIZES = {"tiny": (2, 64, 128, 4), "base": (1, 512, 2048, 8)}
SEEDS = 20


def stock(layers: int, width: int, ffn: int, heads: int, seed: int) -> torch.nn.Module:
    words = Dictionary()
    for word in range(100):
        words.add_symbol(f"w{word}")
    args = Namespace(share_all_embeddings=True, encoder_layers=layers, decoder_layers=layers)
    args.encoder_embed_dim, args.encoder_ffn_embed_dim, args.encoder_attention_heads = width, ffn, heads
    args.decoder_attention_heads = heads
    ARCH_CONFIG_REGISTRY["transformer"](args)
    torch.manual_seed(seed)
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    return ARCH_MODEL_REGISTRY["transformer"].build_model(args, task)


for size, (layers, width, ffn, heads) in SIZES.items():
    models = [dict(stock(layers, width, ffn, heads, seed).named_parameters()) for seed in range(SEEDS)]
    assert "fairseq_admin" not in sys.modules
    with open(Path(__file__).parent / f"parameters_{size}.tsv", "w") as out:
        print("name", "shape", "mean", "std", sep="\t", file=out)
        for name, parameter in models[0].items():
            values = torch.stack([model[name].detach().double() for model in models])
            mean, std = values.mean().item(), values.std(correction=0).item()
            if ".fc" in name:
                mean, std = 0.0, math.sqrt(2 / (width + ffn)) if name.endswith("weight") else 0.0
            print(name, "x".join(map(str, parameter.shape)), f"{mean:.6g}", f"{std:.6g}", sep="\t", file=out)
