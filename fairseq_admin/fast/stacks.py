"""A batch-first encoder and decoder that make their masks once per batch. The plain ones are in method/stacks.py.

In every encoder layer fairseq asks the device whether there is padding, and the host waits for the answer. These stacks
never ask. They are for training. The plain stacks run in evaluation, and if a caller wants a layer's output or
attention weights.
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
"""Key of the encoder's output under which the decoder finds its mask, a `padding_bias`."""


class FastEncoder(Fast, AdminEncoder):
    """fairseq's encoder over the layers of a scheme.

    Attributes:
        batch_first: whether the layers' tensors are rows, (B · T, C), in the current or last forward.
    """

    batch_first = False

    def forward_scriptable(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
        token_embeddings: Tensor | None = None,
    ) -> dict[str, list]:
        """Encode as fairseq does. The output also holds the mask for `FastDecoder`.

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
    """fairseq's decoder over the layers of a scheme. It returns no attention weights and no layer's output.

    Attributes:
        batch_first: see `FastEncoder`.
        left_pad_target: whether targets begin with padding, by the task's option.
    """

    batch_first = False
    left_pad_target = False

    def extract_features_scriptable(
        self, prev_output_tokens: Tensor, encoder_out: Any, *options: Any, **named: Any
    ) -> tuple[Tensor, dict[str, list]]:
        """Decode as fairseq does. If an option is given, the plain decoder runs.

        Shapes: tokens (B, T), features (B, T, C).
        """
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
        """Whether targets begin with padding, where the causal mask would hide every word. Shape (B, T).

        The host does not wait for a GPU's answer: if the task's option is wrong, the GPU stops the run.
        """
        padded = tokens[:, 0].eq(self.padding_idx).any()
        if self.left_pad_target or self.on_cpu(tokens):
            return self.left_pad_target or bool(padded)
        torch._assert_async(~padded, "a target begins with padding: give --left-pad-target True, or --admin-fast off")
        return False

    def _sources(self, encoder_out: Any) -> list[Any]:
        """The input of each layer's encoder-attention: the encoder's output, or keys and values.

        One product computes the keys and values of all layers. There are three exceptions, in which each layer computes
        its own. Under activation checkpointing, shared keys and values would stay in memory until the backward. Under
        layerdrop, a layer may be skipped. On CPUs, the copy of the weights costs more than one product saves.
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
        """Embeddings of words and positions. Shapes (B, T) and (B, T, C)."""
        x = self.embed_scale * self.embed_tokens(tokens)
        if self.project_in_dim is not None:
            x = self.project_in_dim(x)
        if self.embed_positions is not None:
            x = x + self.embed_positions(tokens)
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        return self.dropout_module(x)
