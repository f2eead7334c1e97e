"""Run the authors' own code to make golden tables. This repository contains none of it.

    git clone https://github.com/LiyuanLucasLiu/Transformer-Clinic
    git -C Transformer-Clinic checkout 70f72b708ab074db5ca3726494e3263516041159

It is a fork of fairseq 0.8. It runs on today's Python, numpy and torch except for `numpy.float`, restored here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy
import torch
from torch import Tensor, nn

COMMIT = "70f72b708ab074db5ca3726494e3263516041159"
WORDS = 100
"""Words of the dictionary next to fairseq's four special symbols."""


def verify(checkout: Path, expected: str) -> None:
    """Check that a checkout is at the expected commit, without changes.

    Raises:
        SystemExit: it is at another commit, or has changes.
    """
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True).stdout.strip()
    changed = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=checkout, capture_output=True, text=True)
    if commit != expected or changed.stdout:
        found = f"{commit or 'none'}{' with changes' * bool(changed.stdout)}"
        sys.exit(f"{checkout}: found commit {found}, expected {expected}. git -C {checkout} checkout {expected}")


def enter(checkout: Path) -> None:
    """Make `import fairseq` import the authors' fairseq, and change to an empty folder: their code writes a file.

    Raises:
        SystemExit: as `verify`.
    """
    assert "fairseq" not in sys.modules, "another fairseq is imported already"
    verify(checkout, COMMIT)
    sys.path.insert(0, str(checkout.resolve() / "fairseq"))
    numpy.float = float  # type: ignore[attr-defined]
    os.chdir(tempfile.mkdtemp())
    torch.set_num_threads(1)


def build(*options: object) -> nn.Module:
    """One of the authors' models in training mode, all embeddings tied. Options are those of their fairseq-train."""
    from fairseq import options as parsers
    from fairseq.data import Dictionary
    from fairseq.models import ARCH_MODEL_REGISTRY
    from fairseq.modules import transformer_layer

    # Each stack's running ω is a global; without a reset, a second model would continue from it.
    transformer_layer.encoder_ratio = transformer_layer.decoder_ratio = 1.0
    arguments = ["DATA", "--share-all-embeddings", *map(str, options)]
    args = parsers.parse_args_and_arch(parsers.get_training_parser(), arguments)
    words = Dictionary()
    for word in range(WORDS):
        words.add_symbol(f"w{word}")
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    return ARCH_MODEL_REGISTRY["transformer"].build_model(args, task).train()


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Their model's parameters under today's names, without ω. Stacked q, k and v become separate views."""
    renamed = {}
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".in_proj_")
        if module:
            for projection, part in zip("qkv", parameter.detach().chunk(3)):
                renamed[f"{module}.{projection}_proj.{kind}"] = part
        elif not name.endswith("_ratio_change"):
            renamed[name.replace("_proj_weight", "_proj.weight")] = parameter.detach()
    return renamed


def omegas(model: nn.Module) -> dict[str, float]:
    """ω of every sub-layer of their profiled model, keyed by its norm's name today, in forward order."""
    norms = {"attention": "self_attn", "self": "self_attn", "encoder": "encoder_attn", "fc": "final"}
    omega = {}
    for name, parameter in model.named_parameters():
        if name.endswith("_ratio_change"):
            layer, _, kind = name[: -len("_ratio_change")].rpartition(".")
            assert torch.all(parameter == parameter[0]), name
            omega[f"{layer}.{norms[kind]}_layer_norm"] = parameter[0].item()
    return omega
