"""One more norm in each branch: Keel adds one of the branch's input to Post-LN, Peri-LN one of its output to Pre-LN.

    Keel       LN( a · x + f(LN(x)) )      Chen and Wei 2026 (from second-hand sources)
    Peri-LN    x + LN(f(LN(x)))            Kim et al. 2025 (from second-hand sources)

fairseq's layer has one norm per sub-layer. The branch's first module (an attention or fc1) or its last (an attention or
fc2) holds the second norm, and a hook applies it. A branch's dropout comes after the hook.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .schemes import Layer, attentions_of, change_first


def _norm_query(attention: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Hook before an attention: norm the query, and keys and values if they are the same tensor (self-attention).

    An encoder's output, as keys and values, is not normed.
    """
    query = kwargs["query"]
    normed = attention.input_norm(query)
    same = {name: normed for name in ("query", "key", "value") if kwargs[name] is query}
    return args, {**kwargs, **same}


def _norm_input(linear: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Hook before fc1."""
    return (linear.input_norm(inputs[0]),)


def _norm_output(last: Any, inputs: Any, output: Any) -> Any:
    """Hook after a branch's last module."""
    return change_first(output, last.output_norm)


def norm_inputs(layer: Layer) -> None:
    """Give every branch of a new layer a norm of its input, in place.

    Args:
        layer: one of fairseq's layers.
    """
    for attention in attentions_of(layer):
        attention.input_norm = nn.LayerNorm(layer.embed_dim)
        attention.register_forward_pre_hook(_norm_query, with_kwargs=True)
    layer.fc1.input_norm = nn.LayerNorm(layer.embed_dim)
    layer.fc1.register_forward_pre_hook(_norm_input)


def norm_outputs(layer: Layer) -> None:
    """Give every branch of a new layer a norm of its output, in place.

    Args:
        layer: one of fairseq's layers.
    """
    for last in (*attentions_of(layer), layer.fc2):
        last.output_norm = nn.LayerNorm(layer.embed_dim)
        last.register_forward_hook(_norm_output)
