"""The subject of a measurement: a model at its initialisation, of any depth."""

from __future__ import annotations

import copy
from argparse import Namespace
from dataclasses import fields
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from fairseq import tasks
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY, BaseFairseqModel
from fairseq.tasks import TASK_DATACLASS_REGISTRY

from ..checkpoints.building import made_up_words
from ..checkpoints.checkpoint import STACKS
from ..checkpoints.equivalence import reading
from ..errors import AdminError, explained
from .subject import BATCH, Source, Subject

SYMBOLS = 1004
"""The size of the dictionary of a fresh model on random tokens."""
TASKS = {("encoder", "decoder"): "translation", ("decoder",): "language_modeling", ("encoder",): "masked_lm"}


class Fresh(Subject):
    """A model at its initialisation, of any depth."""

    checkpoints = []

    def __init__(self, arch: str, options: dict[str, object], source: Source) -> None:
        """
        Args:
            arch: fairseq's --arch.
            options: the model's options on the command line.
            source: the origin of the sentences.

        Raises:
            AdminError: --arch names no known architecture.
        """
        self.source, self.name, self.arch, self.options = source, arch, arch, options
        kind = ARCH_MODEL_NAME_REGISTRY.get(arch)
        if kind not in STACKS:
            raise AdminError(f"--arch {arch} was found; expected an architecture of {', '.join(STACKS)}.")
        self.stacks = STACKS[kind]

    def make(self, seed: int = 0, **sizes: int) -> BaseFairseqModel:
        """Build the model that training would start from, and put it into evaluation mode.

        Args:
            seed: number to add to the subject's seed.
            sizes: options that replace those of the subject, such as encoder_layers.

        Returns:
            The model, its ω profiled on the first sample.

        Raises:
            AdminError: fairseq cannot build a model from the options.
        """
        args = Namespace(**copy.deepcopy({**self.options, **sizes}))
        args.arch = args._name = self.arch
        args.admin_fast = "off"
        args.checkpoint_activations = args.offload_activations = False  # their sub-layers' outputs get no gradient
        torch.manual_seed(self.source.seed + seed)
        with explained(f"--arch {self.arch}: no model can be built from these options", "Check them."):
            ARCH_CONFIG_REGISTRY[self.arch](args)
            model = ARCH_MODEL_REGISTRY[self.arch].build_model(args, self.task)
        if not getattr(model, "profiled", True):
            with torch.no_grad():
                model.train()(**self.samples[0]["net_input"])
        return model.eval()

    @cached_property
    def model(self) -> BaseFairseqModel:
        return self.make()

    @cached_property
    def task(self) -> Any:
        source = self.source
        if source.data is None:
            words = dict.fromkeys(("source_dictionary", "target_dictionary", "dictionary"), made_up_words(SYMBOLS))
            return SimpleNamespace(**words, max_positions=lambda: BATCH)
        name = TASKS[self.stacks]
        # Defaults that fairseq-train takes from other groups of options.
        known = {"train_subset": "train", "required_seq_len_multiple": 1, "seed": source.seed}
        options = {
            option.name: known.get(option.name)
            for option in fields(TASK_DATACLASS_REGISTRY[name])
            if str(option.default).startswith("${")
        }
        options.update(data=str(source.data), tokens_per_sample=BATCH // 2)
        with reading(source.data, f"no data for --arch {self.arch}"):
            task = tasks.setup_task(Namespace(task=name, **options))
            task.load_dataset(source.split)
        return task

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        sides = {"encoder": self.task.source_dictionary, "decoder": self.task.target_dictionary}
        return {stack: len(sides[stack]) for stack in self.stacks}
