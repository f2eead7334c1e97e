"""One measured pass over the first training batch: variances of every sub-layer, then ω.

The pass runs before the first real forward, without gradients, on the first sentences of the batch. It changes nothing
in the model except ω: random state, module modes and autocast's cache are what they would have been.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.models import BaseFairseqModel
from fairseq.modules import LayerDropModuleList
from torch import Tensor, nn

from ..pytorch.omega import StackMeasure, profile_stacks
from ..pytorch.trace import undisturbed
from ..version import __version__
from .norms import ShortcutNorm, shortcut_norms
from .schemes import stacks_of
from .sublayers import Sublayer, real_positions, watch

logger = logging.getLogger(__name__)


def observe(stack: Any, rule: str, tokens: Tensor, undo: contextlib.ExitStack) -> StackMeasure:
    """Measure the sub-layers of a stack in its next forward, and set the ω of each by the rule before it is used.

    Args:
        stack: an encoder or a decoder of ShortcutNorms.
        rule: "reference" or "paper".
        tokens: what the stack is given. Shape (B, T).
        undo: closed when the forward has ended.
    """
    measured = StackMeasure(rule, real_positions(tokens, stack.padding_idx))

    def set_omega(sublayer: Sublayer) -> None:
        assert isinstance(sublayer.norm, ShortcutNorm)
        sublayer.norm.set_omega(measured.add(sublayer.shortcut, sublayer.branch))

    watch(stack, tokens, set_omega, undo)
    return measured


@contextlib.contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Dropout stays as in training; layerdrop and weight noise are off; everything is put back afterwards."""
    with undisturbed(model):
        for module in model.modules():
            # Quantisation noise overwrites the weights of linear and embedding layers, but only in training mode.
            if isinstance(module, (LayerDropModuleList, nn.Linear, nn.Embedding)):
                module.training = False
        yield


def inputs(src_tokens: Tensor | None, prev_output_tokens: Tensor | None) -> dict[str, Tensor]:
    """The input of each stack that the model has, in forward order."""
    sides = {"encoder": src_tokens, "decoder": prev_output_tokens}
    return {side: tokens for side, tokens in sides.items() if tokens is not None}


def measure(model: BaseFairseqModel, src_tokens: Tensor | None, prev_output_tokens: Tensor | None, rule: str) -> Tensor:
    """Run the batch once and set every ω by the rule.

    Args:
        model: an encoder-decoder, an encoder or a decoder of ShortcutNorms, in training mode.
        src_tokens: source batch. Shape (B, T_source). None: the model has no encoder.
        prev_output_tokens: decoder input. Shape (B, T_target). None: the model has no decoder.
        rule: "reference" or "paper".

    Returns:
        ω of the encoder's, then of the decoder's sub-layers. Shape (S_encoder + S_decoder,), float32.
    """
    stacks = stacks_of(model)
    with _undisturbed(model), contextlib.ExitStack() as undo:
        words = inputs(src_tokens, prev_output_tokens)
        measures = [observe(stacks[side], rule, tokens, undo) for side, tokens in words.items()]
        encoder_out = stacks["encoder"](src_tokens) if "encoder" in stacks else None
        if "decoder" in stacks:
            stacks["decoder"](prev_output_tokens, encoder_out=encoder_out, features_only=True)
        return torch.cat([measured.omega() for measured in measures])


def from_first_rank(omega: Tensor) -> Tensor:
    """The first data-parallel rank's ω. Every rank has to call this, whatever went wrong before."""
    if distributed_utils.get_data_parallel_world_size() > 1:
        distributed_utils.broadcast(omega, src=0, group=distributed_utils.get_data_parallel_group())
    return omega


def profile(
    model: BaseFairseqModel, src_tokens: Tensor | None, prev_output_tokens: Tensor | None, rule: str, tokens: int
) -> dict[str, Any]:
    """Fill every ω of a model from one training batch, the same on all data-parallel ranks.

    Args:
        model, src_tokens, prev_output_tokens, rule: as for `measure`.
        tokens: budget of padded tokens on the longer side; the batch's first sentences that fit are used.

    Returns:
        Where ω came from: rule, tokens used on either side, seed, version. Log it, and keep it in the checkpoint.

    Raises:
        AdminError: a variance is not a finite number.
    """
    start = time.perf_counter()
    batch, stacks = inputs(src_tokens, prev_output_tokens), stacks_of(model)
    norms = {side: shortcut_norms(stacks[side]) for side in batch}
    named = {"encoder": "source", "decoder": "target"} if len(batch) > 1 else dict.fromkeys(batch, "")

    def attempt(sentences: int) -> Tensor:
        src, prev = (None if side is None else side[:sentences] for side in (src_tokens, prev_output_tokens))
        return measure(model, src, prev, rule)

    widths, sentences = [words.size(1) for words in batch.values()], len(next(iter(batch.values())))
    fitting = min(sentences, max(1, tokens // max(widths)))
    _, sentences, summary = profile_stacks(norms, attempt, fitting, from_first_rank)
    counts = {named[side]: int(batch[side][:sentences].ne(stacks[side].padding_idx).sum()) for side in batch}
    logger.info(
        "Admin: profiled by rule %s on %s tokens in %.2f s: %s",
        rule,
        " and ".join(f"{count} {side}".rstrip() for side, count in counts.items()),
        time.perf_counter() - start,
        summary,
    )
    return {
        "rule": rule,
        **{f"{side}_tokens".lstrip("_"): count for side, count in counts.items()},
        "seed": torch.initial_seed(),
        "version": __version__,
    }
