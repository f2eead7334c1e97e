"""What is analysed: a trained or a fresh model, and the sentences that go through it.

The layers are the plain ones (--admin-fast off), in float32 on the CPU, and dropout is off; ω of a fresh model is
profiled as training would, with dropout.
"""

from __future__ import annotations

import copy
import platform
from argparse import Namespace
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fairseq
import torch
from fairseq import tasks
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from torch import Tensor
from torch.nn.functional import nll_loss

from ..architectures.config import DEPTH_RULES
from ..checkpoints.building import build
from ..checkpoints.checkpoint import OURS, STACKS, Checkpoint
from ..checkpoints.equivalence import data_of
from ..errors import AdminError
from ..method import state_dict
from ..method.layers import avoid_fast_path
from ..method.schemes import SCHEMES, layers_of, stacks_of
from ..version import __version__
from .sentences import BATCH, PADDING, Source, from_chance, from_data, tokens_in, words_of

WORDS = 1000
"""Of a fresh model on random tokens."""
WEIGHTS_BY_DEPTH = ("deepnorm_weights", "t_fixup_weights", "fixup_weights")
"""The functions of initial_weights.py that draw by the depth of the model."""
STACK_NAMES = ("encoder", "decoder")
TASKS = {("encoder", "decoder"): "translation", ("decoder",): "language_modeling", ("encoder",): "masked_lm"}


class Subject:
    """A model and its samples, each made when it is first asked for."""

    checkpoints: list[Checkpoint]
    """Of a trained model, in the order given; none of a fresh one."""
    stacks: tuple[str, ...]
    """"encoder", "decoder" or both."""

    def __init__(self, source: Source) -> None:
        self.source = source

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """fairseq's samples: `net_input`, and `target` with padding where nothing is predicted.

        Raises:
            AdminError: there are not enough tokens.
        """
        if self.source.data is None:
            return from_chance(self._vocabulary(), self.source)
        return from_data(self._task(), self.source, self.stacks)

    @cached_property
    def model(self) -> Any:
        """In evaluation mode, ω profiled."""
        raise NotImplementedError

    @cached_property
    def tokens(self) -> int:
        """How many real tokens the last stack is given."""
        return sum(tokens_in(sample, self.stacks) for sample in self.samples)

    def words(self, sample: dict[str, Any]) -> dict[str, Tensor]:
        """What each stack is given. Shapes (B, T)."""
        return words_of(sample, self.stacks)

    def loss(self, model: Any, sample: dict[str, Any]) -> Tensor:
        """The cross-entropy in nats a predicted token, without label smoothing."""
        scores = model.get_normalized_probs(model(**sample["net_input"]), log_probs=True)
        return nll_loss(scores.flatten(0, 1), sample["target"].flatten(), ignore_index=PADDING)

    def facts(self) -> dict[str, Any]:
        """What a result says of the model and of the sentences."""
        found: dict[str, Any] = {"model": self.model_facts()}
        if "samples" in vars(self):  # there was a use for them
            found["data"] = "random tokens" if self.source.data is None else str(self.source.data)
            found["split"] = self.source.split if self.source.data else None
            found["tokens"] = self.tokens
        return {
            **found,
            "seed": self.source.seed,
            "layers": "plain (--admin-fast off), float32, dropout off",
            "versions": versions(),
        }

    def model_facts(self) -> dict[str, Any]:
        raise NotImplementedError

    def _model_facts(self, name: str, arch: str, scheme: str, rule: str | None) -> dict[str, Any]:
        stacks = stacks_of(self.model)
        return {
            "name": name,
            "arch": arch,
            "scheme": scheme,
            "title": SCHEMES[scheme].title if scheme in SCHEMES else scheme,
            "rule": rule,
            **{f"{side}_layers": len(layers_of(stacks[side])) if side in stacks else 0 for side in STACK_NAMES},
            "width": next(iter(stacks.values())).embed_tokens.embedding_dim,
            "parameters": sum(p.numel() for p in self.model.parameters()),
        }

    def _task(self) -> Any:
        raise NotImplementedError

    def _vocabulary(self) -> dict[str, int]:
        """How many words each stack knows."""
        raise NotImplementedError


class Trained(Subject):
    """The model of a checkpoint, or of several checkpoints of one run."""

    def __init__(self, paths: list[Path], source: Source) -> None:
        """
        Raises:
            AdminError: a file is not a checkpoint of a model that can be analysed.
        """
        super().__init__(source)
        self.checkpoints = [Checkpoint.read(path) for path in paths]
        first = self.checkpoints[0]
        for checkpoint in self.checkpoints:
            if checkpoint.kind not in STACKS:
                raise AdminError(
                    f"{checkpoint.name} is a {checkpoint.options.model.get('_name')}; a checkpoint of a model of "
                    f"{', '.join(STACKS)} was expected."
                )
            shapes = [{key: tensor.shape for key, tensor in it.weights.items()} for it in (first, checkpoint)]
            if shapes[0] != shapes[1]:
                raise AdminError(
                    f"{checkpoint.name} and {first.name} are of different models. Give checkpoints of one run."
                )
            if checkpoint.has_omega and checkpoint.record is None:
                raise AdminError(f"{checkpoint.name}: its omega has not been profiled yet. Give a later checkpoint.")
        self.stacks = first.stacks

    @cached_property
    def model(self) -> Any:
        return build(self.checkpoints[0])

    def model_facts(self) -> dict[str, Any]:
        first = self.checkpoints[0]
        rule = (first.record or {}).get("rule")
        found = self._model_facts(Path(first.name).name, str(first.options.model["_name"]), first.scheme_name, rule)
        return {**found, "checkpoints": [it.name for it in self.checkpoints], "updates": self.checkpoints[-1].updates}

    def _task(self) -> Any:
        assert self.source.data is not None
        return data_of(self.checkpoints[0], self.source.data, self.source.split)

    def _vocabulary(self) -> dict[str, int]:
        return self.checkpoints[0].vocabulary


class Fresh(Subject):
    """A model at its initialisation, of any depth."""

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
        self.arch = arch
        self.options = options
        self.checkpoints = []
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
        task = self._task_once
        args = Namespace(**copy.deepcopy({**self.options, **sizes}))
        args.arch = args._name = self.arch
        args.admin_fast = "off"
        torch.manual_seed(self.source.seed + seed)
        try:
            ARCH_CONFIG_REGISTRY[self.arch](args)
            model = ARCH_MODEL_REGISTRY[self.arch].build_model(args, task)
        except AdminError:
            raise
        except Exception as error:  # fairseq checks little: what does not fit fails where it is first used
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise AdminError(f"--arch {self.arch}: no model can be built from these options ({reason}).") from None
        avoid_fast_path(model)
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
        return not (by_depth or row.shortcut or row.weights in WEIGHTS_BY_DEPTH)

    def model_facts(self) -> dict[str, Any]:
        options: Any = getattr(self.model, "cfg", None)
        ours = hasattr(options, "admin_scheme")
        scheme = options.admin_scheme if ours else state_dict.scheme(self.model.state_dict())
        rule = options.admin_init if ours and SCHEMES[scheme].omega else None
        return {**self._model_facts(self.arch, self.arch, scheme, rule), "updates": 0}

    @cached_property
    def _task_once(self) -> Any:
        if self.source.data is None:
            words = Dictionary()
            for number in range(WORDS):
                words.add_symbol(f"w{number}")
            return SimpleNamespace(
                source_dictionary=words, target_dictionary=words, dictionary=words, max_positions=lambda: BATCH
            )
        data = self.source.data
        name = TASKS[self.stacks]
        # Defaults that a training run would take from other parts of its options.
        elsewhere = {
            option.name: {"train_subset": "train", "required_seq_len_multiple": 1, "seed": self.source.seed}.get(
                option.name
            )
            for option in fields(TASK_DATACLASS_REGISTRY[name])
            if str(option.default).startswith("${")
        }
        args = Namespace(task=name, **{**elsewhere, "data": str(data), "tokens_per_sample": BATCH // 2})
        try:
            task = tasks.setup_task(args)
            task.load_dataset(self.source.split)
        except Exception as error:  # whatever fairseq raises at a folder that is not its own
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise AdminError(
                f"{data}: no data for --arch {self.arch} ({reason}). Give the folder fairseq-preprocess wrote."
            ) from None
        return task

    def _task(self) -> Any:
        return self._task_once

    def _vocabulary(self) -> dict[str, int]:
        task = self._task_once
        sides = {"encoder": task.source_dictionary, "decoder": task.target_dictionary}
        return {stack: len(sides[stack]) for stack in self.stacks}


def versions() -> dict[str, str]:
    """What computed a result."""
    return {
        "fairseq_admin": __version__,
        "fairseq": fairseq.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
