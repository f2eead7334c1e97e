"""One more norm in a branch: of its input, next to Post-LN's, or of its output, next to Pre-LN's.

    Keel       LN( a · x + f(LN(x)) )      Chen and Wei 2026 (from second-hand sources)
    Peri-LN    x + LN(f(LN(x)))            Kim et al. 2025 (from second-hand sources)

fairseq's layer has one norm a sub-layer. The other one is held by the branch's first module, an attention or fc1, or by
its last, an attention or fc2, and applied by a hook; a branch's dropout comes after it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .schemes import attentions_of


def _norm_query(attention: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Hook before an attention. In self-attention keys and values are the query; an encoder's output stays as it is."""
    query = kwargs["query"]
    normed = attention.input_norm(query)
    same = {name: normed for name in ("query", "key", "value") if kwargs[name] is query}
    return args, {**kwargs, **same}


def _norm_input(linear: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Hook before fc1."""
    return (linear.input_norm(inputs[0]),)


def _norm_output(last: Any, inputs: Any, output: Any) -> Any:
    """Hook after a branch's last module."""
    if isinstance(output, Tensor):
        return last.output_norm(output)
    return last.output_norm(output[0]), *output[1:]


def norm_inputs(layer: Any) -> None:
    """Give every branch of one of fairseq's layers, just made, a norm of its input."""
    for attention in attentions_of(layer):
        attention.input_norm = nn.LayerNorm(layer.embed_dim)
        attention.register_forward_pre_hook(_norm_query, with_kwargs=True)
    layer.fc1.input_norm = nn.LayerNorm(layer.embed_dim)
    layer.fc1.register_forward_pre_hook(_norm_input)


def norm_outputs(layer: Any) -> None:
    """Give every branch a norm of its output."""
    for last in (*attentions_of(layer), layer.fc2):
        last.output_norm = nn.LayerNorm(layer.embed_dim)
        last.register_forward_hook(_norm_output)
