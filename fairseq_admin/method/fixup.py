"""Fixup's replacement of layer normalization (Zhang, Dauphin and Ma 2019, rule 3, as a summary of the paper gives it).

    feed-forward   s · fc2( b₃ + relu( b₂ + fc1( b₁ + x ) ) )
    attention      s · out( b₂ + heads( b₁ + x ) )

s is a branch's multiplier, one number, 1 at first. b is a bias before every linear layer and activation, one number, 0
at first; b₁ is in the place of a Pre-LN layer's norm. A hook cannot reach the last linear layer of an attention, but

    out(b + h) = out(h) + b · Σ_columns W_out

so the hook applies b and s to the output of the branch's last module, and does the same for the feed-forward.
As in the authors' code (hongyi-zhang/Fixup, its fairseq models), the linear layers have no bias vectors, and each stack
ends in a bias, the encoder's with a multiplier. The paper's rule has a bias before an attention's last layer; that code
has none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .schemes import Layer, attentions_of, change_first, linears_of


class Shift(nn.Module):
    """s · (x + b), or x + b, in place of a norm. s and b have shape (1,).

    Args:
        multiplier: whether it has s.
    """

    def __init__(self, multiplier: bool = False) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self.multiplier = nn.Parameter(torch.ones(1)) if multiplier else None

    def forward(self, x: Tensor) -> Tensor:
        """Shift and scale x.

        Args:
            x: any shape.

        Returns:
            The same shape and type.
        """
        x = x + self.bias.to(x.dtype)
        return x if self.multiplier is None else x * self.multiplier.to(x.dtype)


def _shift_output(linear: Any, inputs: Any, x: Tensor) -> Tensor:
    """Hook on fc1: the bias before the activation."""
    return x + linear.output_bias.to(x.dtype)


def _end_branch(last: Any, inputs: Any, output: Any) -> Any:
    """Hook on a branch's last module, an attention or fc2: the bias before its linear layer, then the multiplier."""
    linear = last if isinstance(last, nn.Linear) else last.out_proj

    def change(x: Tensor) -> Tensor:
        return (x + (last.input_bias * linear.weight.sum(1)).to(x.dtype)) * last.branch_multiplier.to(x.dtype)

    return change_first(output, change)


def _drop_bias(linear: nn.Linear) -> None:
    """Replace the bias vector by a constant 0 outside the state dict: fairseq's attention needs a bias."""
    zeros = torch.zeros_like(linear.bias.data)
    del linear.bias
    linear.register_buffer("bias", zeros, persistent=False)


def set_up_layer(layer: Layer) -> None:
    """Turn a new layer into Fixup's, in place.

    Args:
        layer: one of fairseq's layers with `Shift`s in place of its norms.
    """
    layer.normalize_before = True
    for linear in linears_of(layer):
        _drop_bias(linear)
    layer.fc1.output_bias = nn.Parameter(torch.zeros(1))
    layer.fc1.register_forward_hook(_shift_output)
    for last in (*attentions_of(layer), layer.fc2):
        last.input_bias = nn.Parameter(torch.zeros(1))
        last.branch_multiplier = nn.Parameter(torch.ones(1))
        last.register_forward_hook(_end_branch)
