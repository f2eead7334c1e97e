"""What Fixup puts in place of layer normalization (Zhang, Dauphin and Ma 2019, rule 3, by a summary of the paper).

    feed-forward   s · fc2( b₃ + relu( b₂ + fc1( b₁ + x ) ) )
    attention      s · out( b₂ + heads( b₁ + x ) )

One number each: s, a branch's multiplier, 1 at first; b, a bias before every linear layer and activation, 0 at first.
b₁ is where a Pre-LN layer's norm is. The last linear layer of an attention cannot be reached from outside, but

    out(b + h) = out(h) + b · Σ_columns W_out

so b and s are applied to what the branch's last module returns; the feed-forward's last layer is treated the same way.
As in the authors' code (hongyi-zhang/Fixup, its fairseq models), the linear layers have no bias vectors, and each stack
ends in a bias, the encoder's with a multiplier. That code has no bias before an attention's last layer; the paper's
rule has one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .schemes import attentions_of, linears_of


class Shift(nn.Module):
    """s · (x + b), or x + b, in place of a norm. s and b have shape (1,)."""

    def __init__(self, multiplier: bool = False) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self.multiplier = nn.Parameter(torch.ones(1)) if multiplier else None

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        x = x + self.bias.to(x.dtype)
        return x if self.multiplier is None else x * self.multiplier.to(x.dtype)


def _shift_output(linear: Any, inputs: Any, x: Tensor) -> Tensor:
    """Hook on fc1: the bias before the activation."""
    return x + linear.output_bias.to(x.dtype)


def _end_branch(last: Any, inputs: Any, output: Any) -> Any:
    """Hook on a branch's last module, an attention or fc2: the bias before its linear layer, then the multiplier."""
    linear = last if isinstance(last, nn.Linear) else last.out_proj
    x = output if isinstance(output, Tensor) else output[0]
    x = (x + (last.input_bias * linear.weight.sum(1)).to(x.dtype)) * last.branch_multiplier.to(x.dtype)
    return x if isinstance(output, Tensor) else (x, *output[1:])


def _drop_bias(linear: nn.Linear) -> None:
    """Replace the bias vector by a constant 0 that is not stored: fairseq's attention needs a bias."""
    zeros = torch.zeros_like(linear.bias.data)
    del linear.bias
    linear.register_buffer("bias", zeros, persistent=False)


def set_up_layer(layer: Any) -> None:
    """Turn one of fairseq's layers, just made, with `Shift`s for its norms, into Fixup's."""
    layer.normalize_before = True
    for linear in linears_of(layer):
        _drop_bias(linear)
    layer.fc1.output_bias = nn.Parameter(torch.zeros(1))
    layer.fc1.register_forward_hook(_shift_output)
    for last in (*attentions_of(layer), layer.fc2):
        last.input_bias = nn.Parameter(torch.zeros(1))
        last.branch_multiplier = nn.Parameter(torch.ones(1))
        last.register_forward_hook(_end_branch)
