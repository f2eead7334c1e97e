"""A model at its initialisation, of any depth, as a subject."""

from __future__ import annotations

import copy
from argparse import Namespace
from dataclasses import fields
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from fairseq import tasks
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.tasks import TASK_DATACLASS_REGISTRY

from ..architectures.config import DEPTH_RULES
from ..checkpoints.checkpoint import OURS, STACKS
from ..checkpoints.equivalence import reading
from ..errors import AdminError, line
from ..method import state_dict
from ..method.schemes import SCHEMES
from .sentences import BATCH, Source
from .subject import Subject

WORDS = 1000
"""Of a fresh model on random tokens."""
TASKS = {("encoder", "decoder"): "translation", ("decoder",): "language_modeling", ("encoder",): "masked_lm"}
OF_ANY_DEPTH = (None, "looklinear_weights", "ds_init_weights", "ds_init_code_weights")
"""The functions of initial_weights.py that do not ask how deep the model is."""


class Fresh(Subject):
    """A model at its initialisation, of any depth."""

    checkpoints = []

    def __init__(self, arch: str, options: dict[str, Any], source: Source) -> None:
        """
        Args:
            arch: fairseq's --arch.
            options: the model's options that were given.
            source: where the sentences are from.

        Raises:
            AdminError: no such architecture can be analysed.
        """
        super().__init__(source)
        self.arch, self.options = arch, options
        kind = ARCH_MODEL_NAME_REGISTRY.get(arch)
        if kind not in STACKS:
            raise AdminError(f"--arch {arch} was found; expected an architecture of {', '.join(STACKS)}.")
        self.stacks = STACKS[kind]

    def make(self, seed: int = 0, **sizes: int) -> Any:
        """A model as training would begin with, in evaluation mode.

        Args:
            seed: added to the subject's.
            sizes: options other than the subject's, as encoder_layers.
        """
        args = Namespace(**copy.deepcopy({**self.options, **sizes}))
        args.arch = args._name = self.arch
        args.admin_fast = "off"
        torch.manual_seed(self.source.seed + seed)
        try:
            ARCH_CONFIG_REGISTRY[self.arch](args)
            model = ARCH_MODEL_REGISTRY[self.arch].build_model(args, self.task)
        except AdminError:
            raise
        except Exception as error:  # fairseq checks little: what does not fit fails where it is first used
            raise AdminError(f"--arch {self.arch}: no model can be built from these options ({line(error)}).") from None
        if not getattr(model, "profiled", True):
            with torch.no_grad():
                model.train()(**self.samples[0]["net_input"])
        return model.eval()

    @cached_property
    def model(self) -> Any:
        return self.make()

    @property
    def cut_is_shallow(self) -> bool:
        """Whether the first layers of a deep model are what a shallow one would begin with."""
        if ARCH_MODEL_NAME_REGISTRY[self.arch] not in OURS:
            return True
        row = SCHEMES[self.options.get("admin_scheme", "admin")]
        by_depth = row.omega and self.options.get("admin_init") in DEPTH_RULES
        return not (by_depth or row.shortcut or row.weights not in OF_ANY_DEPTH)

    def model_facts(self) -> dict[str, Any]:
        options: Any = getattr(self.model, "cfg", None)
        ours = hasattr(options, "admin_scheme")
        scheme = options.admin_scheme if ours else state_dict.scheme(self.model.state_dict())
        rule = options.admin_init if ours and SCHEMES[scheme].omega else None
        return {**self.describe(self.arch, self.arch, scheme, rule), "updates": 0}

    @cached_property
    def task(self) -> Any:
        data = self.source.data
        if data is None:
            words = Dictionary()
            for number in range(WORDS):
                words.add_symbol(f"w{number}")
            dictionaries = dict.fromkeys(("source_dictionary", "target_dictionary", "dictionary"), words)
            return SimpleNamespace(**dictionaries, max_positions=lambda: BATCH)
        name = TASKS[self.stacks]
        # Defaults that a training run would take from other parts of its options.
        known = {"train_subset": "train", "required_seq_len_multiple": 1, "seed": self.source.seed}
        names = [it.name for it in fields(TASK_DATACLASS_REGISTRY[name]) if str(it.default).startswith("${")]
        options = {
            **{option: known.get(option) for option in names},
            "data": str(data),
            "tokens_per_sample": BATCH // 2,
        }
        with reading(data, f"no data for --arch {self.arch}"):
            task = tasks.setup_task(Namespace(task=name, **options))
            task.load_dataset(self.source.split)
        return task

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        sides = {"encoder": self.task.source_dictionary, "decoder": self.task.target_dictionary}
        return {stack: len(sides[stack]) for stack in self.stacks}
