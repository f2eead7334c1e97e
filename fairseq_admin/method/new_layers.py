"""New layers on a pre-trained encoder: the stack, and the measuring pass over the training set that sets it up.

The pass runs after the encoder's weights are loaded and before an optimizer exists, so a half-precision run copies its
float32 masters from the scaled weights. The pass runs in evaluation mode, without gradients, and measures

    μ   the largest L2 norm over the channels of any position of the new layers' input, for DT-Fixup
    ω   of the new layers on the first batch, for Admin

    T time   B batch   C channels   S sub-layers
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models.transformer import TransformerConfig
from torch import Tensor, nn

from ..errors import AdminError
from ..version import __version__
from . import initial_weights, provenance
from .norms import set_omega_by_depth, shortcut_norms
from .profile_rules import profile_stacks
from .profiling import from_first_rank, observe
from .schemes import SCHEMES, by_depth
from .stacks import AdminEncoder

logger = logging.getLogger(__name__)


class NewLayers(AdminEncoder):
    """An encoder of a scheme's layers whose input is another encoder's output.

    Its state dict has a record of its scheme and of the measurements.

    Args:
        cfg: the options of the new layers, as fairseq's layers read them.
        dictionary: the dictionary of the encoder.
    """

    def __init__(self, cfg: TransformerConfig, dictionary: Dictionary) -> None:
        super().__init__(cfg, dictionary, nn.Embedding(1, cfg.encoder.embed_dim, padding_idx=0))
        self.padding_idx = dictionary.pad()
        del self.embed_tokens
        self.scheme = SCHEMES[cfg.admin_scheme]
        initial_weights.draw(cfg.admin_scheme, {"encoder": self})
        self.register_buffer(provenance.KEY, torch.zeros(provenance.LENGTH))
        self.by_norm = cfg.admin_scheme == "dt-fixup"
        self.measured = self.by_norm or (self.scheme.omega and not by_depth(cfg.admin_init))
        if not self.measured:
            if self.scheme.omega:
                set_omega_by_depth(self, cfg.admin_init)
            self.record({"rule": cfg.admin_init} if self.scheme.omega else {})

    def record(self, measured: dict[str, object]) -> None:
        """Store the record of the scheme and of the measurement in the state dict.

        Args:
            measured: the entries besides scheme and version.
        """
        record = {"scheme": self.cfg.admin_scheme, **measured, "version": __version__}
        getattr(self, provenance.KEY).copy_(provenance.encode(record))

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> dict[str, Any]:
        """Return the state dict unchanged.

        A pre-trained encoder's checkpoint lacks these layers. fairseq would mistake it for an older version's, and drop
        the norm at the end of the stack.
        """
        return state_dict

    def forward_embedding(self, src_tokens: Tensor, token_embedding: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the input unchanged. Shape (B, T, C)."""
        assert token_embedding is not None
        return token_embedding, token_embedding

    def extend(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Run the new layers.

        Args:
            tokens: the words, for their padding. Shape (B, T).
            features: the pre-trained encoder's output. Shape (B, T, C).

        Returns:
            Shape (B, T, C).
        """
        return self(tokens, token_embeddings=features)["encoder_out"][0].transpose(0, 1)


def largest_norm(encode: Callable[[Tensor], Tensor], batches: Iterable[Tensor], padding: int) -> Tensor:
    """μ: the largest L2 norm over the channels of any real position of any batch.

    Args:
        encode, batches: see `set_up`.
        padding: the index of padding.

    Returns:
        Shape (1,), float64.
    """
    outputs = (encode(tokens)[tokens.ne(padding)].double() for tokens in batches)
    return torch.stack([torch.linalg.vector_norm(output, dim=-1).max() for output in outputs]).max()[None]


def set_up(new: NewLayers, encode: Callable[[Tensor], Tensor], batches: Iterable[Tensor], sentences: int) -> None:
    """Measure, then set ω or scale the weights, the same on all data-parallel ranks, and record the measurement.

    Args:
        new: the new layers, in evaluation mode.
        encode: maps tokens (B, T) to the encoder's output (B, T, C), in evaluation mode.
        batches: the training set's tokens, each (B, T).
        sentences: number of sentences in all batches.

    Raises:
        AdminError: a measurement is not a finite number.
    """
    start = time.perf_counter()
    record: dict[str, object]
    with torch.no_grad():
        if new.by_norm:
            mu = from_first_rank(largest_norm(encode, batches, new.padding_idx)).item()
            if not math.isfinite(mu):
                raise AdminError(
                    f"the largest norm of the pre-trained encoder's output is {mu}; a finite number was expected. The "
                    "output overflows, or the weights are damaged: check it with fairseq-validate, or train in fp32."
                )
            initial_weights.dt_fixup_scale(new, mu)
            record, summary = {"mu": mu}, f"largest norm of the encoder's output (mu) {mu:.4g}"
        else:
            tokens = next(iter(batches))
            sentences = len(tokens)

            def measure() -> Tensor:
                with contextlib.ExitStack() as undo:
                    stack = observe(new, new.cfg.admin_init, tokens, undo)
                    new.extend(tokens, encode(tokens))
                return stack.omega()

            _, summary = profile_stacks({"new layers": shortcut_norms(new)}, measure, from_first_rank)
            record = {"rule": new.cfg.admin_init}
    new.record({**record, "sentences": sentences})
    seconds = time.perf_counter() - start
    logger.info("Admin: on %d sentences in evaluation mode in %.2f s: %s", sentences, seconds, summary)
