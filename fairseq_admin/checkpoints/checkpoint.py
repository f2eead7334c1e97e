"""A fairseq checkpoint: its weights, and facts about its model, task and training.

C channels   V vocabulary
"""

from __future__ import annotations

import re
from argparse import Namespace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY
from torch import Tensor

from .. import fingerprint
from ..architectures.config import fill_masked, fill_sizes, flat_decoder, plain_options
from ..errors import AdminError
from ..method import provenance, state_dict
from ..method.schemes import MODEL_SCHEMES, SCHEMES, Scheme
from . import files

OURS = ("transformer_admin", "transformer_lm_admin", "masked_lm_admin")
"""The models of this plugin."""

STACKS = {
    **dict.fromkeys(("transformer_lm", "transformer_lm_admin"), ("decoder",)),
    **dict.fromkeys(("roberta", "masked_lm_admin"), ("encoder",)),
    **dict.fromkeys(("transformer", "transformer_admin"), ("encoder", "decoder")),
}
"""The stacks of each model whose weights we know by name: ours and their stock twins."""

FOLD = "admin_fold"
"""Entry of a checkpoint's `extra_state` that marks a folded model."""


class Options(NamedTuple):
    """A checkpoint's options. Each part has its registered name under `_name`."""

    model: dict[str, Any]
    task: dict[str, Any]
    criterion: dict[str, Any]


class Checkpoint:
    """A checkpoint. Facts about it are computed at their first use."""

    def __init__(self, state: dict[str, Any], path: Path | None = None) -> None:
        """
        Args:
            state: the contents, as fairseq writes them.
            path: their file, for messages. None: there is no file.
        """
        self.state = state
        self.path = path
        self.name = "the checkpoint" if path is None else str(path)

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Read a file, by `files.read`.

        Args:
            path: the file.

        Returns:
            The checkpoint.

        Raises:
            AdminError: it is not a whole checkpoint.
        """
        return cls(files.read(path), path)

    def write(self, path: Path) -> None:
        """Write a file, by `files.saved`.

        Args:
            path: the file.

        Raises:
            AdminError: it cannot be written.
        """
        with files.saved(self.state, path):
            pass

    @property
    def weights(self) -> dict[str, Tensor]:
        """The model's state dict."""
        return self.state["model"]

    @property
    def updates(self) -> int:
        """Number of updates that the model was trained for."""
        return (self.state.get("optimizer_history") or [{}])[-1].get("num_updates", 0)

    @property
    def folded(self) -> bool:
        """Whether `fold_checkpoint` made it."""
        return FOLD in (self.state.get("extra_state") or {})

    @property
    def text(self) -> dict[str, str]:
        """Fingerprints of its dictionaries, merges and text settings (fingerprint.py). A stock checkpoint has none."""
        earlier = self.state["extra_state"][FOLD] if self.folded else self.state.get("task_state")
        return fingerprint.read_fingerprints(self.weights) or dict((earlier or {}).get(fingerprint.KEY) or {})

    @cached_property
    def options(self) -> Options:
        """The options of its training, from fairseq's command line, from hydra, or from a version before 0.10.

        Raises:
            AdminError: the file has none.
        """
        if self.state.get("args") is not None:
            flat = plain_options(self.state["args"])
            return Options(*({**flat, "_name": flat.get(kind)} for kind in ("arch", "task", "criterion")))
        if self.state.get("cfg") is None:
            raise AdminError(
                f"{self.name} has neither 'cfg' nor 'args', which give the model's sizes. Use the file that "
                "fairseq-train saved."
            )
        return Options(*(plain_options(self.state["cfg"].get(kind)) for kind in Options._fields))

    @cached_property
    def kind(self) -> str | None:
        """The registered name of its model. None: this fairseq does not know it."""
        return ARCH_MODEL_NAME_REGISTRY.get(self.options.model.get("_name"))

    @cached_property
    def scheme_name(self) -> str:
        """The name of its scheme.

        A stock Transformer counts as the scheme that puts its norms in the same places. For a pre-trained encoder with
        new layers, it is the scheme of the encoder. For a model that we do not know, it is the name of the
        architecture.
        """
        if self.kind in OURS:
            return self.options.model.get("admin_scheme") or "admin"  # checkpoints from before there was a choice
        if self.kind not in (*STACKS, "deeper_admin"):
            return str(self.options.model.get("_name"))
        return state_dict.scheme(self.weights)

    @property
    def trained_as(self) -> tuple[str, str]:
        """The name of the scheme that it was trained with, and its title. (A folded model's weights are Post-LN.)"""
        name = self.state["extra_state"][FOLD].get("scheme", "admin") if self.folded else self.scheme_name
        title = SCHEMES[name].title if name in SCHEMES else name
        return name, f"{title}, folded" if self.folded else title

    @property
    def scheme(self) -> Scheme:
        """The scheme's row of the table.

        Raises:
            AdminError: this version has no such scheme.
        """
        if self.scheme_name not in MODEL_SCHEMES:
            raise AdminError(
                f"{self.name} is of the scheme {self.scheme_name}; expected one of {', '.join(MODEL_SCHEMES)}. Use the "
                "version of fairseq_admin that trained it."
            )
        return SCHEMES[self.scheme_name]

    @property
    def stacks(self) -> tuple[str, ...]:
        """Its stacks: "encoder", "decoder" or both."""
        return STACKS.get(str(self.kind), ("encoder", "decoder"))

    @cached_property
    def layers(self) -> dict[str, int]:
        """Number of layers of each stack in the file: fewer than were trained, if some were pruned."""
        return {stack: state_dict.layers(self.weights, stack) for stack in self.stacks}

    @cached_property
    def omegas(self) -> dict[str, dict[str, Tensor]]:
        """ω of every sub-layer, by `state_dict.omegas`. Empty without ω. Shapes (C,), float64."""
        return state_dict.omegas(self.weights)

    @cached_property
    def record(self) -> dict[str, Any] | None:
        """The record of ω's origin, or of another scheme. None: not profiled yet, or a stock model."""
        return self._decoded(provenance.KEY)

    @cached_property
    def new_layers(self) -> dict[str, Any] | None:
        """The record of new layers on a pre-trained encoder. None: it has no new layers."""
        return self._decoded(f"more.{provenance.KEY}")

    def _decoded(self, key: str) -> dict[str, Any] | None:
        try:
            return provenance.decode(self.weights[key]) if key in self.weights else None
        except AdminError as error:
            raise AdminError(f"{self.name}: {error}") from None

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """V, the number of rows in the embedding of each stack. (An adaptive one has a matrix per band.)

        Raises:
            AdminError: a stack has no embedding.
        """
        weights = state_dict.strip_roberta_prefix(self.weights)
        sizes = {}
        for stack in self.stacks:
            matrix = re.compile(rf"{stack}\.embed_tokens\.(embeddings\.\d+\.0\.)?weight")
            sizes[stack] = sum(tensor.size(0) for key, tensor in weights.items() if matrix.fullmatch(key))
            if not sizes[stack]:
                raise AdminError(
                    f"{self.name} has no {stack}.embed_tokens.weight: it is not a Transformer with that stack, or "
                    "damaged."
                )
        return sizes

    @cached_property
    def arguments(self) -> Namespace:
        """The model's options with every size, even those that only its --arch set.

        The options describe these weights. So --encoder-embed-path and --decoder-embed-path are unset, and if
        --encoder-layers-to-keep pruned the model, the number of layers is that of the kept layers.

        Raises:
            AdminError: this fairseq does not know the architecture.
        """
        args = Namespace(**{"_name": None, **self.options.model})
        if args._name not in ARCH_CONFIG_REGISTRY:
            raise AdminError(
                f"{self.name}: its architecture is {args._name}, which this fairseq does not know. Use the fairseq, "
                "or the --user-dir, it was trained with."
            )
        for stack, layers in self.layers.items():
            setattr(args, f"{stack}_embed_path", None)
            if getattr(args, f"{stack}_layers_to_keep", None):
                setattr(args, f"{stack}_layers", layers)
                setattr(args, f"{stack}_layers_to_keep", None)
        ARCH_CONFIG_REGISTRY[args._name](args)
        if self.stacks == ("decoder",):
            return flat_decoder(args)
        (fill_masked if self.stacks == ("encoder",) else fill_sizes)(args)
        return args
