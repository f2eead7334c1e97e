"""Make the golden tables of the methods in the authors' code (see clinic.py). From the folder tests:

    python -O -m golden.laws TRANSFORMER_CLINIC

-O skips an assertion that came with their DeepNorm. With it, ReZero and looks-linear no longer start.

laws.tsv has the mean, standard deviation and distribution of every kind of parameter, for each method that their code
trains, over the layers of a 3L-2L model of width 32 and over 100 seeds. Names are today's, with a star for the layer;
their rezero_weight is our branch_scale.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch
from golden import clinic, omega, rivals
from torch import nn

TABLE = Path(__file__).with_name("laws.tsv")
LOGITS = Path(__file__).with_name("logits.json")
GRADIENTS = Path(__file__).with_name("gradients.json")
FUNCTIONS = ("post-ln", "pre-ln", "rezero", "rezero-post-ln", "deepnorm")
METHODS = {
    "admin": ["--init-type=adaptive-profiling"],
    "post-ln": ["--init-type=default"],
    "pre-ln": ["--init-type=default", "--encoder-normalize-before", "--decoder-normalize-before"],
    "rezero": ["--init-type=rezero"],
    "rezero-post-ln": ["--init-type=rezero_postln"],
    "deepnorm": ["--init-type=deepnet"],
    "looklinear": ["--init-type=looklinear"],
}
"""Our name of each scheme -> options of the authors' code."""
SIZES = {
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_embed_dim": 32,
    "decoder_embed_dim": 32,
    "encoder_ffn_embed_dim": 64,
    "decoder_ffn_embed_dim": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
SEEDS = 100


def kind(name: str) -> str:
    """A parameter's name without the number of its layer."""
    return re.sub(r"layers\.\d+", "layers.*", name).replace("rezero_weight", "branch_scale")


def options_of(sizes: dict[str, int]) -> list[str]:
    return [f"--{option.replace('_', '-')}={size}" for option, size in sizes.items()]


def with_values(method: str) -> nn.Module:
    """One of their models. A formula sets every parameter, and every ω except a stack's first."""
    model = clinic.build("--arch=transformer", "--dropout=0", *METHODS[method], *options_of(rivals.SIZES)).eval()
    with torch.no_grad():
        for name, parameter in clinic.parameters(model).items():
            parameter.copy_(omega.value(todays(name), tuple(parameter.shape)))
        for name, parameter in model.named_parameters():
            if name.endswith("_ratio_change") and "layers.0.attention" not in name and "layers.0.self" not in name:
                parameter.copy_(omega.value(todays(name), tuple(parameter.shape)) + 1)
    return model


def todays(name: str) -> str:
    """Today's name of a parameter."""
    norm = re.search(r"(attention|self|encoder|fc)_ratio_change$", name)
    if norm:
        kind = {"attention": "self_attn", "self": "self_attn", "encoder": "encoder_attn", "fc": "final"}[norm[1]]
        return f"{name[: norm.start()]}{kind}_layer_norm.omega_delta"
    return name.replace("rezero_weight", "branch_scale").replace("_proj_weight", "_proj.weight")


def gradients(method: str) -> dict[str, list[float]]:
    """`rivals.gradients` of one of their models."""
    model = with_values(method)
    for stack in (model.encoder, model.decoder):  # our first ω is not a parameter
        layer = stack.layers[0]
        for name in ("attention_ratio_change", "self_ratio_change"):
            if isinstance(getattr(layer, name, None), nn.Parameter):
                value = getattr(layer, name).detach()
                delattr(layer, name)
                setattr(layer, name, value.double())
    return rivals.gradients(model, todays)


def logits(method: str) -> list[list[list[float]]]:
    """`rivals.logits` of one of their models, whose parameters have other names."""
    with torch.no_grad():
        return rivals.rounded(with_values(method)(*rivals.batch())[0][..., : rivals.SHOWN])


def main(checkout: Path) -> None:
    if __debug__:
        sys.exit("Found assertions on, expected python -O: ReZero does not start otherwise.")
    clinic.enter(checkout)
    lines = [f' "{method}": {json.dumps(logits(method))}' for method in FUNCTIONS]
    LOGITS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    lines = [f' "{method}": {json.dumps(gradients(method))}' for method in ("admin", *FUNCTIONS)]
    GRADIENTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    options = options_of(SIZES)
    rows = ["method\tkind\tshape\tmean\tstd\tlaw"]
    for method, own in METHODS.items():
        drawn: dict[str, list[torch.Tensor]] = {}
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            for name, parameter in clinic.parameters(clinic.build("--arch=transformer", *own, *options)).items():
                drawn.setdefault(kind(name), []).append(parameter.double())
        for of_kind, tensors in drawn.items():
            values = torch.stack(tensors)
            std = values.std(correction=0).item()
            # Uniform values stay within sqrt(3) standard deviations; of thousands of normal values, some exceed three.
            law = "constant" if std == 0 else "uniform" if values.abs().max() < 2 * std else "normal"
            shape = "x".join(map(str, values.shape[1:]))
            rows.append(f"{method}\t{of_kind}\t{shape}\t{values.mean():.6g}\t{std:.6g}\t{law}")
    TABLE.write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
