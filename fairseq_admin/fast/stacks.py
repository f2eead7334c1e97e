"""An encoder and a decoder that know of padding once a batch, and are batch-first; twins: those of method/stacks.py.

fairseq asks the device in every encoder layer whether there is padding, and each question makes the host wait.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..method.stacks import AdminDecoder, AdminEncoder
from .attention import Causal, Mask, Padding
from .shortcut import Shared
from .twin import Fast

MASK = "mask"
"""The entry of the encoder's output that holds the batch's `Mask`: `Padding`, if it has any."""


class FastEncoder(Fast, AdminEncoder):
    """fairseq's encoder over the layers of a scheme.

    Attributes:
        batch_first: whether the layers' tensors are (B, T, C) in the forward that runs, or ran last.
        shared: what its norms share.
    """

    batch_first = False
    shared: Shared

    def forward_scriptable(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
        token_embeddings: Tensor | None = None,
    ) -> dict[str, list]:
        """As fairseq's, and what `FastDecoder` reads of it: the mask.

        Shapes: tokens (B, T), embeddings (B, T, C), `encoder_out` (T, B, C).
        """
        self.batch_first = not self.plain
        if self.plain:
            return super().forward_scriptable(src_tokens, src_lengths, return_all_hiddens, token_embeddings)
        hidden = src_tokens.eq(self.padding_idx)
        padded = bool(hidden.any())
        mask = Padding(hidden) if padded else Mask()
        x, embedding = self.forward_embedding(src_tokens, token_embeddings)
        if padded:
            x = x.masked_fill(hidden.unsqueeze(-1), 0)
        states, branches = [x], [None]
        with self.shared.together():
            for layer in self.layers:
                out = layer(x, encoder_padding_mask=mask)
                x, branch = out if isinstance(out, tuple) else (out, None)
                if return_all_hiddens:
                    states.append(x)
                    branches.append(branch)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        return {
            "encoder_out": [x.transpose(0, 1)],
            "encoder_padding_mask": [hidden],
            MASK: [mask],
            "encoder_embedding": [embedding],
            "encoder_states": [it.transpose(0, 1) for it in states] if return_all_hiddens else [],
            "fc_results": [it if it is None else it.transpose(0, 1) for it in branches[1:]]
            if return_all_hiddens
            else [],
            "src_tokens": [],
            "src_lengths": [hidden.logical_not().sum(1, keepdim=True).int()],
        }


class FastDecoder(Fast, AdminDecoder):
    """fairseq's decoder over the layers of a scheme.

    In training it returns no attention weights, unless a layer is named, and no layer's output, which would hold memory
    that the backward has no use for. fairseq's always returns its last layer's weights, and all outputs.

    Attributes:
        batch_first, shared: as `FastEncoder`'s.
    """

    batch_first = False
    shared: Shared

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
        self.batch_first = not (
            self.plain
            or incremental_state is not None
            or full_context_alignment
            or not (encoder_out is None or MASK in encoder_out)
            # Where padding comes first, a position before the words would see nothing but padding.
            or bool(prev_output_tokens[:, 0].eq(self.padding_idx).any())
        )
        if not self.batch_first:
            return super().extract_features_scriptable(
                prev_output_tokens,
                encoder_out,
                incremental_state,
                full_context_alignment,
                alignment_layer,
                alignment_heads,
            )
        if alignment_layer is None and not self.training:
            alignment_layer = self.num_layers - 1
        source = source_mask = None
        if encoder_out is not None:
            source, (source_mask,) = encoder_out["encoder_out"][0].transpose(0, 1), encoder_out[MASK]
        x, future, weights = self._embedded(prev_output_tokens), Causal(prev_output_tokens.size(1)), None
        states = [] if self.training else [x]
        with self.shared.together():
            for number, layer in enumerate(self.layers):
                asked = number == alignment_layer
                x, found, _ = layer(
                    x, source, source_mask, self_attn_mask=future, need_attn=asked, need_head_weights=asked
                )
                if not self.training:
                    states.append(x)
                weights = found.float().to(x)[:alignment_heads].mean(0) if asked and found is not None else weights
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        if self.project_out_dim is not None:
            x = self.project_out_dim(x)
        return x, {"attn": [weights], "inner_states": [it.transpose(0, 1) for it in states]}

    def _embedded(self, tokens: Tensor) -> Tensor:
        """Words and their positions. Shapes (B, T) and (B, T, C)."""
        x = self.embed_scale * self.embed_tokens(tokens)
        if self.project_in_dim is not None:
            x = self.project_in_dim(x)
        if self.embed_positions is not None:
            x = x + self.embed_positions(tokens)
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        return self.dropout_module(x)
