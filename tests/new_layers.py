"""Small classifiers on a pre-trained encoder, and their data."""

from __future__ import annotations

import random
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from conftest import run_module
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.tasks.sentence_prediction import SentencePredictionTask
from language import MASKED
from reference import dictionary
from torch import nn

import fairseq_admin.plugin  # noqa: F401  (registers the models)

HEAD = "h"


def binarised(folder: Path) -> Path:
    """Binarised sentences of 2 to 12 words, from a vocabulary of 40 words.

    The label says whether the first word of a sentence is one of the first 20 words of the vocabulary.
    """
    generator = random.Random(1)
    for split, size in (("train", 120), ("valid", 20)):
        lines = [[generator.randrange(40) for _ in range(generator.randint(2, 12))] for _ in range(size)]
        (folder / f"{split}.words").write_text("".join(" ".join(f"w{w}" for w in line) + "\n" for line in lines))
        (folder / f"{split}.label").write_text("".join(f"{'yes' if line[0] < 20 else 'no'}\n" for line in lines))
    data = folder / "bin"
    for kind, name in (("words", "input0"), ("label", "label")):
        arguments = ["--only-source", *(f"--{split}pref={folder / split}.{kind}" for split in ("train", "valid"))]
        result = run_module("fairseq_cli.preprocess", *arguments, "--destdir", data / name, log=folder / f"{name}.log")
        assert result.status == 0, result.output
    for path in (data / "input0").iterdir():  # data for the encoder itself
        (data / path.name).write_bytes(path.read_bytes())
    return data


def task(data: Path, **changed: Any) -> SentencePredictionTask:
    options = {"num_classes": 2, "init_token": None, "separator_token": None, "no_shuffle": False, "max_positions": 64}
    options |= {"shorten_method": "none", "shorten_data_split_list": "", "add_prev_output_tokens": False, "seed": 1}
    options |= {"regression_target": False, "classification_head_name": HEAD, "d2v2_multi": False}
    return SentencePredictionTask.setup_task(Namespace(**{"data": str(data), **options, **changed}))


class Task:
    """A task for pairs of sentences, without data."""

    source_dictionary = dictionary(45)
    cfg = SimpleNamespace(classification_head_name=HEAD)

    def max_positions(self) -> int:
        return 64


def build(task: Any, arch: str = "deeper_admin", seed: int = 1, **changed: Any) -> nn.Module:
    """A fresh `deeper_admin` or stock `roberta` in training mode, with three plain layers and a head."""
    args = Namespace(**{"admin_fast": "off", "admin_scheme": "post-ln", **MASKED, **changed})
    ARCH_CONFIG_REGISTRY[arch](args)
    torch.manual_seed(seed)
    model = ARCH_MODEL_REGISTRY[arch].build_model(args, task)
    model.register_classification_head(HEAD, num_classes=2)
    return model.train()


def pretrained(task: Any, **changed: Any) -> dict[str, torch.Tensor]:
    """Weights of a stock RoBERTa without a head, with random noise.

    Without noise, all outputs of the fresh norms would have the same Euclidean length.
    """
    state = build(SimpleNamespace(source_dictionary=task.source_dictionary, max_positions=lambda: 64), "roberta", 7)
    with torch.no_grad():
        for p in state.parameters():
            p.add_(0.2 * torch.randn(p.shape))
    return {key: tensor for key, tensor in state.state_dict().items() if "classification" not in key}
