"""An encoder and a decoder that make their masks once a batch, and are batch-first; the plain ones: method/stacks.py.

fairseq asks the device in every encoder layer whether there is padding, and each question makes the host wait. Here
nothing is asked. These stacks are for training: in evaluation, and for whoever wants a layer's output or attention
weights, the plain ones compute.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..method.schemes import layers_of
from ..method.stacks import AdminDecoder, AdminEncoder
from .attention import causal_bias, heads_of, padding_bias
from .plain import Fast

BIAS = "bias"
"""The entry of the encoder's output that holds its mask for the decoder: `padding_bias`."""


class FastEncoder(Fast, AdminEncoder):
    """fairseq's encoder over the layers of a scheme.

    Attributes:
        batch_first: whether the layers' tensors are rows, (B · T, C), in the forward that runs, or ran last.
    """

    batch_first = False

    def forward_scriptable(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
        token_embeddings: Tensor | None = None,
    ) -> dict[str, list]:
        """As fairseq's, and the mask for `FastDecoder`.

        Shapes: tokens (B, T), embeddings (B, T, C), `encoder_out` (T, B, C).
        """
        self.batch_first = self.training and not (self.plain or return_all_hiddens)
        if not self.batch_first:
            return super().forward_scriptable(src_tokens, src_lengths, return_all_hiddens, token_embeddings)
        hidden = src_tokens.eq(self.padding_idx)
        x, embedding = self.forward_embedding(src_tokens, token_embeddings)
        x, bias = x.masked_fill(hidden.unsqueeze(-1), 0).flatten(0, 1), padding_bias(hidden, x, self.on_cpu(x))
        for layer in self.layers:
            x = layer(x, encoder_padding_mask=bias)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        return {
            "encoder_out": [x.view(embedding.shape).transpose(0, 1)],
            "encoder_padding_mask": [hidden],
            BIAS: [bias],
            "encoder_embedding": [embedding],
            "encoder_states": [],
            "fc_results": [],
            "src_tokens": [],
            "src_lengths": [hidden.logical_not().sum(1, keepdim=True).int()],
        }


class FastDecoder(Fast, AdminDecoder):
    """fairseq's decoder over the layers of a scheme; it returns no attention weights and no layer's output.

    Attributes:
        batch_first: as `FastEncoder`'s.
        left_pad_target: whether the task says that targets begin with padding.
    """

    batch_first = False
    left_pad_target = False

    def extract_features_scriptable(
        self, prev_output_tokens: Tensor, encoder_out: Any, *options: Any, **named: Any
    ) -> tuple[Tensor, dict[str, list]]:
        """As fairseq's, whose options are all for the plain one. Shapes: tokens (B, T), features (B, T, C)."""
        self.batch_first = self.training and not (
            self.plain
            or any(option is not None and option is not False for option in (*options, *named.values()))
            or not (encoder_out is None or BIAS in encoder_out)
            or self._begins_with_padding(prev_output_tokens)
        )
        if not self.batch_first:
            return super().extract_features_scriptable(prev_output_tokens, encoder_out, *options, **named)
        x = self._embedded(prev_output_tokens).flatten(0, 1)
        future = causal_bias(prev_output_tokens.size(1), x, self.on_cpu(x))
        bias = None if encoder_out is None else encoder_out[BIAS][0]
        for layer, source in zip(self.layers, self._sources(encoder_out)):
            x, _, _ = layer(x, source, bias, self_attn_mask=future)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        if self.project_out_dim is not None:
            x = self.project_out_dim(x)
        return x.view(*prev_output_tokens.shape, -1), {"attn": [None], "inner_states": []}

    def _begins_with_padding(self, tokens: Tensor) -> bool:
        """Whether a position before the words would see nothing but padding. Shape (B, T).

        The host does not wait for a GPU's answer: if the task did not say so, the GPU stops the run.
        """
        padded = tokens[:, 0].eq(self.padding_idx).any()
        if self.left_pad_target or self.on_cpu(tokens):
            return self.left_pad_target or bool(padded)
        torch._assert_async(~padded, "a target begins with padding: give --left-pad-target True, or --admin-fast off")
        return False

    def _sources(self, encoder_out: Any) -> list[Any]:
        """What each layer's encoder-attention reads: keys and values, of all layers by one product, or its input.

        Its input where a layer is computed again in the backward, which would keep its keys and values until then, or
        may not run, and on CPUs, where one product saves less than the copy of the weights costs.
        """
        source = None if encoder_out is None else encoder_out["encoder_out"][0].transpose(0, 1).flatten(0, 1)
        attentions: list[Any] = [layer.encoder_attn for layer in layers_of(self)]
        one_by_one = self.cfg.checkpoint_activations or type(self.layers) is not nn.ModuleList
        if source is None or not any(attentions) or one_by_one or self.on_cpu(source):
            return [source] * len(self.layers)
        linears = [linear for attention in attentions for linear in (attention.k_proj, attention.v_proj)]
        heads = heads_of(source, linears, len(encoder_out[BIAS][0]), attentions[0].num_heads, False)
        return list(zip(heads[::2], heads[1::2]))

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
