"""One measured pass over the first training batch: variances of every sub-layer, then ω.

The pass runs before the first real forward, without gradients, on the first sentences of the batch. It changes nothing
in the model except ω: random state, module modes and autocast's cache are what they would have been.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.models import BaseFairseqModel
from fairseq.modules import LayerDropModuleList
from torch import Tensor, nn

from ..errors import AdminError
from ..pytorch.omega import StackMeasure, omega_range, within_memory
from ..pytorch.trace import undisturbed
from ..version import __version__
from .norms import ShortcutNorm, shortcut_norms
from .schemes import stacks_of

logger = logging.getLogger(__name__)


class StackProbe:
    """Measures the sub-layers of one stack as they run, and sets their ω by the rule.

    Args:
        norms: the stack's norms in forward order, S of them.
        rule: "reference" or "paper".
        real: which positions of the stack are not padding. Shape (T, B), bool.
    """

    def __init__(self, norms: list[ShortcutNorm], rule: str, real: Tensor) -> None:
        self.norms = norms
        self.measured = StackMeasure(rule, real.flatten().nonzero().squeeze(1))

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        for norm in self.norms:
            norm.set_omega(1.0)
        handles = [norm.register_forward_pre_hook(self._observe) for norm in self.norms]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _observe(self, norm: nn.Module, inputs: tuple[tuple[Tensor, Tensor]]) -> None:
        branch, shortcut = inputs[0]
        assert isinstance(norm, ShortcutNorm)
        norm.set_omega(self.measured.add(shortcut, branch))

    def omega(self) -> Tensor:
        """ω of every sub-layer after the pass. Shape (S,), float32."""
        assert len(self.measured.omegas) == len(self.norms), "a sub-layer did not run exactly once"
        return self.measured.omega()


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
    given, stacks = inputs(src_tokens, prev_output_tokens), stacks_of(model)
    probes = [
        StackProbe(shortcut_norms(stacks[side]), rule, tokens.ne(stacks[side].padding_idx).t())
        for side, tokens in given.items()
    ]
    with _undisturbed(model), contextlib.ExitStack() as attached:
        for probe in probes:
            attached.enter_context(probe.attached())
        encoder_out = stacks["encoder"](src_tokens) if "encoder" in stacks else None
        if "decoder" in stacks:
            stacks["decoder"](prev_output_tokens, encoder_out=encoder_out, features_only=True)
        return torch.cat([probe.omega() for probe in probes])


def _first_sentences(src_tokens: Tensor | None, prev_output_tokens: Tensor | None, tokens: int) -> int:
    """How many sentences to use: their padded longer side holds at most that many tokens, but at least one of them."""
    sides = list(inputs(src_tokens, prev_output_tokens).values())
    return min(len(sides[0]), max(1, tokens // max(side.size(1) for side in sides)))


def _measure_in_memory(
    model: BaseFairseqModel,
    src_tokens: Tensor | None,
    prev_output_tokens: Tensor | None,
    rule: str,
    tokens: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`measure`, with half the sentences each time the device runs out of memory. Returns ω and the batch used."""

    def attempt(sentences: int) -> tuple[Tensor, dict[str, Tensor]]:
        src, prev = (None if side is None else side[:sentences] for side in (src_tokens, prev_output_tokens))
        return measure(model, src, prev, rule), inputs(src, prev)

    return within_memory(attempt, _first_sentences(src_tokens, prev_output_tokens, tokens))


def from_first_rank(omega: Tensor) -> Tensor:
    """The first data-parallel rank's ω. Every rank has to call this, whatever went wrong before."""
    if distributed_utils.get_data_parallel_world_size() > 1:  # on TPUs too, where torch.distributed is not used
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
        AdminError: the batch holds no token, or a variance is not a finite number.
    """
    start = time.perf_counter()
    given, stacks = inputs(src_tokens, prev_output_tokens), stacks_of(model)
    norms = {side: shortcut_norms(stack) for side, stack in stacks.items()}
    named = {"encoder": "source ", "decoder": "target "} if len(given) > 1 else dict.fromkeys(given, "")
    every = [norm for part in norms.values() for norm in part]
    failure = None

    def real(batch: dict[str, Tensor]) -> dict[str, int]:
        return {side: int(words.ne(stacks[side].padding_idx).sum()) for side, words in batch.items()}

    used = given
    try:
        if not all(real(given).values()):
            shapes = ", ".join(f"{named[side]}{tuple(words.shape)}" for side, words in given.items())
            raise AdminError(
                f"the first training batch holds no token ({shapes}, all padding); profiling needs one. Check the "
                "training data."
            )
        omega, used = _measure_in_memory(model, src_tokens, prev_output_tokens, rule, tokens)
    except Exception as error:
        failure = error
        omega = torch.full((len(every),), math.nan, device=next(iter(given.values())).device)
    omega = from_first_rank(omega)
    if failure is not None and not torch.isfinite(omega).all():
        raise failure
    for norm, value in zip(every, omega):
        norm.set_omega(value)
    ranges = [
        omega_range(*named_part) for named_part in zip(norms, omega.split([len(part) for part in norms.values()]))
    ]
    counts = real(used)
    logger.info(
        "Admin: profiled by rule %s on %s tokens in %.2f s: %s",
        rule,
        " and ".join(f"{count} {named[side]}".rstrip() for side, count in counts.items()),
        time.perf_counter() - start,
        "; ".join(ranges),
    )
    return {
        "rule": rule,
        **{f"{named[side]}tokens".replace(" ", "_"): count for side, count in counts.items()},
        "seed": torch.initial_seed(),
        "version": __version__,
    }
