"""The profiling pass over the first training batch: variances of every sub-layer, then ω.

The pass runs before the first real forward, without gradients, on the first sentences of the batch. It changes only ω:
it restores random state, module modes and autocast's cache.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping

import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.models import BaseFairseqModel
from fairseq.modules import LayerDropModuleList
from torch import Tensor, nn

from ..core.undisturbed import undisturbed
from ..version import __version__
from .norms import ShortcutNorm, shortcut_norms
from .profile_rules import StackMeasure, profile_stacks
from .schemes import Stack, stacks_of
from .sublayers import Sublayer, real_positions, watch

logger = logging.getLogger(__name__)


def observe(stack: Stack, rule: str, tokens: Tensor, undo: contextlib.ExitStack) -> StackMeasure:
    """Measure the sub-layers of a stack in its next forward, and set each ω by the rule before the sub-layer uses it.

    Args:
        stack: an encoder or a decoder of ShortcutNorms.
        rule: "reference" or "paper".
        tokens: the stack's input. Shape (B, T).
        undo: close it after the forward.

    Returns:
        The measurement. Its `omega()` is valid after the forward.
    """
    measured = StackMeasure(rule, real_positions(tokens, stack.padding_idx))

    def set_omega(sublayer: Sublayer) -> None:
        assert isinstance(sublayer.norm, ShortcutNorm)
        sublayer.norm.set_omega(measured.add(sublayer.shortcut, sublayer.branch))

    watch(stack, tokens, set_omega, undo)
    return measured


@contextlib.contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Keep dropout as in training, switch off layerdrop and weight noise, and restore everything afterwards."""
    with undisturbed(model):
        for module in model.modules():
            # In training mode, quantisation noise overwrites the weights of linear and embedding layers.
            if isinstance(module, (LayerDropModuleList, nn.Linear, nn.Embedding)):
                module.training = False
        yield


def measure(model: BaseFairseqModel, words: Mapping[str, Tensor], rule: str) -> Tensor:
    """Run a batch once and set every ω by the rule.

    Args:
        model: an encoder-decoder, an encoder or a decoder of ShortcutNorms, in training mode.
        words: the input of each stack, by side, the encoder's first. Shapes (B, T).
        rule: "reference" or "paper".

    Returns:
        ω of the sub-layers, the encoder's first. Shape (S_encoder + S_decoder,), float32.
    """
    stacks = stacks_of(model)
    with _undisturbed(model), contextlib.ExitStack() as undo:
        measures = [observe(stacks[side], rule, tokens, undo) for side, tokens in words.items()]
        encoder_out = stacks["encoder"](words["encoder"]) if "encoder" in words else None
        if "decoder" in words:
            stacks["decoder"](words["decoder"], encoder_out=encoder_out, features_only=True)
        return torch.cat([measured.omega() for measured in measures])


def from_first_rank(omega: Tensor) -> Tensor:
    """Broadcast the first data-parallel rank's ω. Every rank must call this, even after an error of its own.

    Args:
        omega: this rank's ω, which is overwritten. Shape (S,).

    Returns:
        The first rank's ω. Shape (S,).
    """
    if distributed_utils.get_data_parallel_world_size() > 1:
        distributed_utils.broadcast(omega, src=0, group=distributed_utils.get_data_parallel_group())
    return omega


def profile(model: BaseFairseqModel, words: Mapping[str, Tensor], rule: str, tokens: int) -> dict[str, object]:
    """Fill every ω of a model from one training batch, the same on all data-parallel ranks.

    Args:
        model, words, rule: see `measure`.
        tokens: budget of padded tokens on the longer side; the pass takes the batch's first sentences that fit.

    Returns:
        The record of ω's origin for the checkpoint: rule, tokens used on each side, seed, version.

    Raises:
        AdminError: a variance is not a finite number.
    """
    start = time.perf_counter()
    stacks = stacks_of(model)
    norms = {side: shortcut_norms(stacks[side]) for side in words}
    labels = {"encoder": "source", "decoder": "target"} if len(words) > 1 else dict.fromkeys(words, "")

    sizes = [batch.shape for batch in words.values()]
    sentences = min(sizes[0][0], max(1, tokens // max(longest for _, longest in sizes)))

    def measure_what_fits() -> Tensor:
        """Measure the first sentences of the batch. Whenever memory runs out, halve their number."""
        nonlocal sentences
        while True:
            try:
                return measure(model, {side: batch[:sentences] for side, batch in words.items()}, rule)
            except RuntimeError as error:
                if "out of memory" not in str(error) or sentences == 1:
                    raise
            sentences //= 2
            logger.warning("Admin: out of memory while profiling; trying again with %d sentences", sentences)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    _, summary = profile_stacks(norms, measure_what_fits, from_first_rank)
    counts = {labels[side]: int(words[side][:sentences].ne(stacks[side].padding_idx).sum()) for side in words}
    text = " and ".join(f"{count} {side}".rstrip() for side, count in counts.items())
    seconds = time.perf_counter() - start
    logger.info("Admin: profiled by rule %s on %s tokens in %.2f s: %s", rule, text, seconds, summary)
    return {
        "rule": rule,
        **{f"{side}_tokens".lstrip("_"): count for side, count in counts.items()},
        "seed": torch.initial_seed(),
        "version": __version__,
    }
