"""The subject of a measurement: a model, here a trained one, and the sentences that go through it.

The layers are plain (--admin-fast off), in float32 on the CPU, without dropout. ω of a fresh model is profiled as in
training, with dropout. Batches are small, so that memory does not grow with the number of tokens.
"""

from __future__ import annotations

import platform
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import fairseq
import torch
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from fairseq.utils import resolve_max_positions
from torch import Tensor
from torch.nn.functional import nll_loss

from ..checkpoints import averaging
from ..checkpoints.building import build, check_weights
from ..checkpoints.checkpoint import STACKS, Checkpoint
from ..checkpoints.equivalence import FIRST_WORD, PAD, data_of, reading
from ..errors import AdminError
from ..method import provenance, state_dict
from ..method.schemes import SCHEMES, SIDES, layers_of, stacks_of
from ..version import __version__

BATCH = 512
"""Largest number of tokens in a batch, padding included; longer sentences are left out."""
LENGTH = 32
"""Words in a random sentence."""


class Source(NamedTuple):
    """The origin of the sentences."""

    data: Path | None
    """A folder that fairseq-preprocess wrote; None: random words."""
    split: str
    tokens: int
    """Smallest number of real tokens for the last stack."""
    seed: int
    """For the choice of sentences, for random words, and for a fresh model's weights."""


class Subject:
    """A model and its samples, each made at its first use; see Trained and Fresh."""

    source: Source
    name: str
    """The model's name in errors and results."""
    arch: str
    """fairseq's --arch."""
    checkpoints: list[Checkpoint]
    """The checkpoints of a trained model, in the order given. A fresh model has no checkpoint."""
    stacks: tuple[str, ...]
    """"encoder", "decoder" or both."""
    model: Any
    """In evaluation mode, ω profiled."""
    task: Any
    """fairseq's task, with the split loaded."""
    vocabulary: Any
    """The number of words in each stack's dictionary, by the stack's name."""

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """fairseq's samples: `net_input`, and `target`, with padding at positions without a prediction.

        Raises:
            AdminError: there are not enough tokens.
        """
        return self._random_samples() if self.source.data is None else self._read_samples(self.source.data)

    def _random_samples(self) -> list[dict[str, Any]]:
        """Batches of random words, without padding, and random targets."""
        generator = torch.Generator().manual_seed(self.source.seed)
        shape = (max(1, min(self.source.tokens, BATCH) // LENGTH), LENGTH)
        *_, last = self.vocabulary.values()
        samples = []
        for _ in range(-(-self.source.tokens // (shape[0] * LENGTH))):
            words = [torch.randint(FIRST_WORD, size, shape, generator=generator) for size in self.vocabulary.values()]
            target = torch.randint(FIRST_WORD, last, shape, generator=generator)
            inputs = dict(zip(("src_tokens", "prev_output_tokens"), words))
            samples.append({"net_input": {**inputs, "src_lengths": torch.full(shape[:1], LENGTH)}, "target": target})
        return samples

    def _read_samples(self, data: Path) -> list[dict[str, Any]]:
        """Batches of the task's split, shuffled with the seed, until there are enough tokens."""
        source, task = self.source, self.task
        longest = max(BATCH, getattr(getattr(task, "args", None), "tokens_per_sample", 0) or 0)
        positions = resolve_max_positions(longest, task.max_positions())
        limits = {"max_tokens": longest, "max_positions": positions, "ignore_invalid_inputs": True, "seed": source.seed}
        samples: list[dict[str, Any]] = []
        tokens = 0
        with reading(data):
            for sample in task.get_batch_iterator(task.dataset(source.split), **limits).next_epoch_itr(shuffle=True):
                samples.append(sample)
                tokens += self.tokens(sample)
                if tokens >= source.tokens:
                    return samples
        raise AdminError(
            f"{data}: its {source.split} set has {tokens} tokens in sentences of up to {longest}, and "
            f"{source.tokens} were asked for. Give --tokens {tokens}, or another --split."
        )

    def words(self, sample: dict[str, Any]) -> dict[str, Tensor]:
        """Find the input of each stack.

        Args:
            sample: one of `samples`.

        Returns:
            By side. Shapes (B, T).
        """
        inputs = ("src_tokens", "prev_output_tokens")[: len(self.stacks)]
        return {stack: sample["net_input"][name] for stack, name in zip(self.stacks, inputs)}

    def tokens(self, sample: dict[str, Any]) -> int:
        """Count the real tokens in the last stack's input.

        Args:
            sample: one of `samples`.

        Returns:
            Their number.
        """
        return int(self.words(sample)[self.stacks[-1]].ne(PAD).sum())

    def loss(self, model: BaseFairseqModel, sample: dict[str, Any]) -> Tensor:
        """Compute the cross-entropy without label smoothing.

        Args:
            model: the subject's model, or another model of the same kind.
            sample: one of `samples`.

        Returns:
            A scalar, in nats per predicted token.
        """
        softmax = getattr(stacks_of(model).get("decoder"), "adaptive_softmax", None)
        if softmax is not None:  # fairseq changes the result of this log-softmax in place, and a backward needs it
            softmax.lsm.forward = lambda logits: logits.log_softmax(1).clone()
        scores = model.get_normalized_probs(model(**sample["net_input"]), log_probs=True)
        return nll_loss(scores.flatten(0, 1), sample["target"].flatten(), ignore_index=PAD)

    def backward(self, model: BaseFairseqModel) -> None:
        """Add the gradient of the mean loss over the batches to the gradients of a model's weights.

        Args:
            model: the subject's model, or another model of the same kind.
        """
        for sample in self.samples:
            (self.loss(model, sample) / len(self.samples)).backward()

    def facts(self) -> dict[str, Any]:
        """Describe the model and the sentences.

        Returns:
            The entries that every result has, whatever the measure.
        """
        facts: dict[str, Any] = {"model": self._model_facts()}
        if "samples" in vars(self):  # a measure, or profiling, has used them
            facts["data"] = "random tokens" if self.source.data is None else str(self.source.data)
            facts["split"] = self.source.split if self.source.data else None
            facts["tokens"] = sum(map(self.tokens, self.samples))
        layers = "plain (--admin-fast off), float32, dropout off"
        versions = {
            "fairseq_admin": __version__,
            "fairseq": fairseq.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        return {**facts, "seed": self.source.seed, "layers": layers, "versions": versions}

    def _model_facts(self) -> dict[str, Any]:
        stacks, weights = stacks_of(self.model), self.model.state_dict()
        if self.checkpoints:
            scheme, title = self.checkpoints[0].trained_as
        else:
            scheme = getattr(getattr(self.model, "cfg", None), "admin_scheme", None) or state_dict.scheme(weights)
            title = SCHEMES[scheme].title if scheme in SCHEMES else scheme
        record = provenance.decode(weights[provenance.KEY]) if provenance.KEY in weights else None
        return {
            "name": self.name,
            "arch": self.arch,
            "scheme": scheme,
            "title": title,
            "rule": (record or {}).get("rule"),
            **{f"{side}_layers": len(layers_of(stacks[side])) if side in stacks else 0 for side in SIDES},
            "width": next(iter(stacks.values())).embed_tokens.embedding_dim,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            **({"checkpoints": [checkpoint.name for checkpoint in self.checkpoints]} if self.checkpoints else {}),
            "updates": self.checkpoints[-1].updates if self.checkpoints else 0,
        }


class Trained(Subject):
    """The model of a checkpoint, or of several checkpoints of one run."""

    def __init__(self, paths: list[Path], source: Source) -> None:
        """
        Raises:
            AdminError: a file is not a checkpoint of a model that can be analysed.
        """
        self.source = source
        self.checkpoints = [Checkpoint.read(path) for path in paths]
        first = self.checkpoints[0]
        for checkpoint in self.checkpoints:
            if checkpoint.kind not in STACKS:
                raise AdminError(
                    f"{checkpoint.name} is a {checkpoint.options.model.get('_name')}; a checkpoint of a model of "
                    f"{', '.join(STACKS)} was expected."
                )
            averaging.refuse_other_run(first, checkpoint)
            check_weights(checkpoint)
            if checkpoint.omegas and checkpoint.record is None:
                raise AdminError(f"{checkpoint.name}: its omega has not been profiled yet. Give a later checkpoint.")
        self.name, self.arch = paths[0].name, str(first.options.model["_name"])
        self.stacks, self.vocabulary = first.stacks, first.vocabulary

    @cached_property
    def model(self) -> BaseFairseqModel:
        return build(self.checkpoints[0])

    @cached_property
    def task(self) -> FairseqTask:
        assert self.source.data is not None
        return data_of(self.checkpoints[0], self.source.data, self.source.split)
