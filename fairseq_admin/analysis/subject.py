"""What is measured: a model, here a trained one, and the sentences that go through it.

The layers are the plain ones (--admin-fast off), in float32 on the CPU, and dropout is off; ω of a fresh model is
profiled as training would, with dropout.
"""

from __future__ import annotations

import platform
from functools import cached_property
from pathlib import Path
from typing import Any

import fairseq
import torch
from torch import Tensor
from torch.nn.functional import nll_loss

from ..checkpoints.building import build, check
from ..checkpoints.checkpoint import STACKS, Checkpoint
from ..checkpoints.equivalence import data_of
from ..errors import AdminError
from ..method.schemes import SCHEMES, layers_of, stacks_of
from ..version import __version__
from .sentences import PADDING, Source, from_chance, from_data, tokens_in, words_of

STACK_NAMES = ("encoder", "decoder")


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

    def backward(self, model: Any) -> None:
        """Add the gradient of the mean loss over the batches to the model's."""
        for sample in self.samples:
            (self.loss(model, sample) / len(self.samples)).backward()

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
            check(checkpoint)
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


def versions() -> dict[str, str]:
    """What computed a result."""
    return {
        "fairseq_admin": __version__,
        "fairseq": fairseq.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
