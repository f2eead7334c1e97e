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
from .sentences import PADDING, Source, from_data, random_samples, tokens_in, words_of


class Subject:
    """A model and its samples, each made when it is first asked for. Trained and Fresh say how."""

    checkpoints: list[Checkpoint]
    """Of a trained model, in the order given; none of a fresh one."""
    stacks: tuple[str, ...]
    """"encoder", "decoder" or both."""
    model: Any
    """In evaluation mode, ω profiled."""
    task: Any
    """fairseq's, with the split loaded."""
    vocabulary: Any
    """How many words each stack knows, by its name."""

    def __init__(self, source: Source) -> None:
        self.source = source

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """fairseq's samples: `net_input`, and `target` with padding where nothing is predicted.

        Raises:
            AdminError: there are not enough tokens.
        """
        if self.source.data is None:
            return random_samples(self.vocabulary, self.source)
        return from_data(self.task, self.source, self.stacks)

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
        facts: dict[str, Any] = {"model": self.model_facts()}
        if "samples" in vars(self):  # there was a use for them
            facts["data"] = "random tokens" if self.source.data is None else str(self.source.data)
            facts["split"] = self.source.split if self.source.data else None
            facts["tokens"] = sum(tokens_in(sample, self.stacks) for sample in self.samples)
        layers = "plain (--admin-fast off), float32, dropout off"
        return {**facts, "seed": self.source.seed, "layers": layers, "versions": versions()}

    def model_facts(self) -> dict[str, Any]:
        raise NotImplementedError

    def describe(self, name: str, arch: str, scheme: str, rule: str | None) -> dict[str, Any]:
        """What `model_facts` says of any model."""
        stacks = stacks_of(self.model)
        return {
            "name": name,
            "arch": arch,
            "scheme": scheme,
            "title": SCHEMES[scheme].title if scheme in SCHEMES else scheme,
            "rule": rule,
            **{
                f"{side}_layers": len(layers_of(stacks[side])) if side in stacks else 0
                for side in ("encoder", "decoder")
            },
            "width": next(iter(stacks.values())).embed_tokens.embedding_dim,
            "parameters": sum(p.numel() for p in self.model.parameters()),
        }


class Trained(Subject):
    """The model of a checkpoint, or of several checkpoints of one run."""

    def __init__(self, paths: list[Path], source: Source) -> None:
        """
        Raises:
            AdminError: a file is not a checkpoint of a model that can be analysed.
        """
        super().__init__(source)
        self.checkpoints = [Checkpoint.outline(path) for path in paths]
        first = self.checkpoints[0]
        shapes = {key: tensor.shape for key, tensor in first.weights.items()}
        for checkpoint in self.checkpoints:
            if checkpoint.kind not in STACKS:
                raise AdminError(
                    f"{checkpoint.name} is a {checkpoint.options.model.get('_name')}; a checkpoint of a model of "
                    f"{', '.join(STACKS)} was expected."
                )
            if {key: tensor.shape for key, tensor in checkpoint.weights.items()} != shapes:
                raise AdminError(
                    f"{checkpoint.name} and {first.name} are of different models. Give checkpoints of one run."
                )
            if checkpoint.has_omega and checkpoint.record is None:
                raise AdminError(f"{checkpoint.name}: its omega has not been profiled yet. Give a later checkpoint.")
            check(checkpoint)
        self.stacks, self.vocabulary = first.stacks, first.vocabulary

    @cached_property
    def model(self) -> Any:
        return build(self.checkpoints[0])

    @cached_property
    def task(self) -> Any:
        assert self.source.data is not None
        return data_of(self.checkpoints[0], self.source.data, self.source.split)

    def model_facts(self) -> dict[str, Any]:
        first = self.checkpoints[0]
        rule = (first.record or {}).get("rule")
        facts = self.describe(Path(first.name).name, str(first.options.model["_name"]), first.scheme_name, rule)
        names = [checkpoint.name for checkpoint in self.checkpoints]
        return {**facts, "checkpoints": names, "updates": self.checkpoints[-1].updates}


def versions() -> dict[str, str]:
    """What computed a result."""
    return {
        "fairseq_admin": __version__,
        "fairseq": fairseq.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
