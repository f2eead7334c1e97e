"""An encoder and a decoder that know of padding once a batch; twins: the ones of method/stacks.py.

fairseq asks the device in every encoder layer whether there is padding, and each question makes the host wait.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..method.stacks import AdminDecoder, AdminEncoder
from .attention import Causal, Padding
from .twin import Fast

PADDING = "padding"
"""The entry of the encoder's output that holds the batch's `Padding`, if it has any."""


class FastEncoder(Fast, AdminEncoder):
    """fairseq's encoder over the layers of a scheme."""

    def forward_scriptable(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
        token_embeddings: Tensor | None = None,
    ) -> dict[str, list]:
        """As fairseq's, and what `FastDecoder` reads of it: `padding`, empty where there is none.

        Shapes: tokens (B, T), embeddings (B, T, C), `encoder_out` (T, B, C).
        """
        if self.plain:
            return super().forward_scriptable(src_tokens, src_lengths, return_all_hiddens, token_embeddings)
        hidden = src_tokens.eq(self.padding_idx)
        padding = Padding(hidden) if bool(hidden.any()) else None
        x, embedding = self.forward_embedding(src_tokens, token_embeddings)
        if padding is not None:
            x = x.masked_fill(hidden.unsqueeze(-1), 0)
        x = x.transpose(0, 1)
        states, branches = [x], []
        for layer in self.layers:
            out = layer(x, encoder_padding_mask=padding)
            x, branch = out if isinstance(out, tuple) else (out, None)
            states.append(x)
            branches.append(branch)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        return {
            "encoder_out": [x],
            "encoder_padding_mask": [hidden],
            PADDING: [] if padding is None else [padding],
            "encoder_embedding": [embedding],
            "encoder_states": states if return_all_hiddens else [],
            "fc_results": branches if return_all_hiddens else [],
            "src_tokens": [],
            "src_lengths": [hidden.logical_not().sum(1, keepdim=True).int()],
        }


class FastDecoder(Fast, AdminDecoder):
    """fairseq's decoder over the layers of a scheme.

    In training it returns no attention weights, unless a layer is named; fairseq's computes its last layer's always.
    """

    _future: Causal | None = None

    def extract_features_scriptable(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Any,
        incremental_state: Any = None,
        full_context_alignment: bool = False,
        alignment_layer: int | None = None,
        alignment_heads: int | None = None,
    ) -> tuple[Tensor, dict[str, list]]:
        """As fairseq's. Shapes: tokens (B, T), features (B, T, C)."""
        if not self.plain and incremental_state is None:
            if self.training and alignment_layer is None:
                alignment_layer = -1  # no layer's number
            # Where padding comes first, a position before the words would see nothing but padding.
            if not bool(prev_output_tokens[:, 0].eq(self.padding_idx).any()):
                self._future = Causal(prev_output_tokens.size(1))
            if encoder_out is not None and PADDING in encoder_out:
                encoder_out = {**encoder_out, "encoder_padding_mask": encoder_out[PADDING]}
        try:
            return super().extract_features_scriptable(
                prev_output_tokens,
                encoder_out,
                incremental_state,
                full_context_alignment,
                alignment_layer,
                alignment_heads,
            )
        finally:
            self._future = None

    def buffered_future_mask(self, tensor: Tensor) -> Any:
        """As fairseq's, for tensors of shape (T, B, C)."""
        return super().buffered_future_mask(tensor) if self._future is None else self._future
