"""A fairseq checkpoint, read once: its weights, and what it says about its model, its task and its training.

C channels   V vocabulary
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY
from torch import Tensor

from .. import fingerprint
from ..architectures.config import fill_masked, fill_sizes, flat_decoder
from ..errors import AdminError
from ..method import provenance, state_dict
from ..method.schemes import MODEL_SCHEMES, SCHEMES, Scheme
from . import files, options
from .options import Options

OURS = ("transformer_admin", "transformer_lm_admin", "masked_lm_admin")
"""The models of this plugin."""

STACKS = {
    **dict.fromkeys(("transformer_lm", "transformer_lm_admin"), ("decoder",)),
    **dict.fromkeys(("roberta", "masked_lm_admin"), ("encoder",)),
    **dict.fromkeys(("transformer", "transformer_admin"), ("encoder", "decoder")),
}
"""The stacks of every model whose weights are known by name, ours and their stock twins."""

FOLD = "admin_fold"
"""The entry of a checkpoint's `extra_state` that tells a folded model from one that never had an ω."""


class Checkpoint:
    """One checkpoint and what can be known about it, worked out once, when first asked for."""

    def __init__(self, state: dict[str, Any], path: Path | None = None) -> None:
        """
        Args:
            state: the contents, as fairseq writes them.
            path: the file that they are from, which errors name; None: they were made here.
        """
        self.state = state
        self.path = path
        self.name = "the checkpoint" if path is None else str(path)

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """A checkpoint from its file, by `files.read`."""
        return cls(files.read(path), path)

    def write(self, path: Path) -> None:
        """Save the checkpoint by `files.saved`, without a check."""
        with files.saved(self.state, path):
            pass

    @property
    def weights(self) -> dict[str, Tensor]:
        """The model's state dict."""
        return self.state["model"]

    @property
    def updates(self) -> int:
        """How many updates the model was trained for."""
        return (self.state.get("optimizer_history") or [{}])[-1].get("num_updates", 0)

    @property
    def folded(self) -> bool:
        """Whether `fold` made it."""
        return FOLD in (self.state.get("extra_state") or {})

    @property
    def text(self) -> dict[str, str]:
        """Fingerprints of what its text was made with, as fingerprint.py names them; none of one that was not ours."""
        earlier = self.state["extra_state"][FOLD] if self.folded else self.state.get("task_state")
        return fingerprint.read_fingerprints(self.weights) or dict((earlier or {}).get(fingerprint.KEY) or {})

    def note_text(self, fingerprints: Mapping[str, str]) -> None:
        """Add fingerprints to those of `text`."""
        self.state["model"] = fingerprint.with_fingerprints(self.weights, {**self.text, **fingerprints})

    @cached_property
    def options(self) -> Options:
        """What it was trained with, by `options.read`."""
        return options.read(self.state, self.name)

    @cached_property
    def kind(self) -> str | None:
        """The name of its registered model; None: this fairseq does not know it."""
        return ARCH_MODEL_NAME_REGISTRY.get(self.options.model.get("_name"))

    @cached_property
    def scheme_name(self) -> str:
        """The scheme that it was trained with; of a stock Transformer, where its norms are.

        Of a pre-trained encoder with new layers or a head alone, the encoder's; of any other model, its architecture.
        """
        if self.kind in OURS:
            return self.options.model.get("admin_scheme") or "admin"  # checkpoints from before there was a choice
        if self.kind not in (*STACKS, "deeper_admin"):
            return str(self.options.model.get("_name"))
        return state_dict.scheme(self.weights)

    @property
    def scheme(self) -> Scheme:
        """The scheme's row of the table; refused if this version has none."""
        if self.scheme_name not in MODEL_SCHEMES:
            raise AdminError(
                f"{self.name} is of the scheme {self.scheme_name}; expected one of {', '.join(MODEL_SCHEMES)}. Use the "
                "fairseq_admin that it was trained with."
            )
        return SCHEMES[self.scheme_name]

    @property
    def stacks(self) -> tuple[str, ...]:
        """The stacks of that kind of model: "encoder", "decoder" or both."""
        return STACKS.get(str(self.kind), ("encoder", "decoder"))

    @cached_property
    def layers(self) -> dict[str, int]:
        """How many layers each stack has in the file, which holds fewer than were trained if some were pruned."""
        return {stack: state_dict.layers(self.weights, stack) for stack in self.stacks}

    @cached_property
    def omegas(self) -> dict[str, dict[str, Tensor]]:
        """ω of every sub-layer, as `state_dict.omegas` gives it; empty without ω. Shapes (C,), float64."""
        return state_dict.omegas(self.weights)

    @cached_property
    def record(self) -> dict[str, Any] | None:
        """Where ω came from, or which other scheme it is; None: not profiled yet, or a stock model."""
        return self._decoded(provenance.KEY)

    @cached_property
    def more(self) -> dict[str, Any] | None:
        """The same of the new layers on a pre-trained encoder; None: it has none."""
        return self._decoded(f"more.{provenance.KEY}")

    def _decoded(self, key: str) -> dict[str, Any] | None:
        try:
            return provenance.decode(self.weights[key]) if key in self.weights else None
        except AdminError as error:
            raise AdminError(f"{self.name}: {error}") from None

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """V, how many rows the embedding of each stack has; an adaptive one has a matrix per band."""
        named = state_dict.of_stacks(self.weights)
        sizes = {}
        for stack in self.stacks:
            matrix = re.compile(rf"{stack}\.embed_tokens\.(embeddings\.\d+\.0\.)?weight")
            sizes[stack] = sum(tensor.size(0) for key, tensor in named.items() if matrix.fullmatch(key))
            if not sizes[stack]:
                raise AdminError(
                    f"{self.name} has no {stack}.embed_tokens.weight: it is not a Transformer with that stack, or "
                    "damaged."
                )
        return sizes

    @cached_property
    def arguments(self) -> Namespace:
        """The model's options with every size, even those that only its --arch gave.

        They describe what is in the file. So they name no file of embeddings and, for a model pruned with
        --encoder-layers-to-keep, count the layers that were kept.
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
