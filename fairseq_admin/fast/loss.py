"""`--criterion label_smoothed_cross_entropy_fast`: fairseq's loss, the plain one, without copies of the logits.

    loss = Σ (1 - ε - ε_i) · (lse(x) - x_target) + ε_i · Σ_v (lse(x) - x_v),   ε_i = ε / (V - 1)
    gradient = softmax(x) - (1 - ε - ε_i) · [v = target] - ε_i

with x a position's logits, V words, and both sums over positions that are not padding. fairseq keeps log-probabilities,
in float32, next to the logits, and makes as much again in the backward. Here the logits alone are kept, their gradient
is written over them, and everything else is made a few rows at a time.

torch's linear_cross_entropy and liger-kernel have no second value for the log, which wants the loss without smoothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.models import BaseFairseqModel, FairseqDecoder
from fairseq.models.transformer import TransformerModelBase
from torch import Tensor
from torch.autograd.function import once_differentiable

from .compiled import compiled

CHUNK = {"cpu": 2**20, "cuda": 2**26}
"""Numbers worked on at a time: some MB, which a cache holds, and on a GPU enough to fill it."""


def _chunks(logits: Tensor) -> Iterator[slice]:
    rows = max(1, CHUNK.get(logits.device.type, 2**24) // logits.size(1))
    return (slice(start, start + rows) for start in range(0, len(logits), rows))


def row_sums(logits: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    """Of log-probabilities, the target's and the sum of all. Shapes (N, V) and (N, 1), results (N, 1)."""
    lprobs = torch.log_softmax(logits, 1, dtype=torch.promote_types(logits.dtype, torch.float32))
    return lprobs.gather(1, target), lprobs.sum(1, keepdim=True)


def write_gradient(logits: Tensor, target: Tensor, weight: Tensor, of_target: float, of_every: float) -> None:
    """Overwrite logits with the loss's gradient. Shapes (N, V), others (N, 1)."""
    gradient = torch.softmax(logits, 1, dtype=weight.dtype).sub_(of_every)
    of_targets = (gradient.gather(1, target) - of_target) * weight
    torch.mul(gradient, weight, out=logits)
    logits.scatter_(1, target, of_targets.to(logits.dtype))


class _SmoothedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, epsilon: float, padding: int, compile: bool) -> Any:
        spread = epsilon / (logits.size(1) - 1)
        target = target.unsqueeze(1)
        real = target.ne(padding)
        parts: tuple[Any, ...] = (row_sums, write_gradient)
        of_rows, ctx.write_gradient = map(compiled, parts) if compile else parts
        sums = [of_rows(logits[rows], target[rows]) for rows in _chunks(logits)]
        exact, every = (torch.cat(parts) for parts in zip(*sums))
        nll, smooth = (-torch.where(real, value, 0).sum() for value in (exact, every))
        ctx.save_for_backward(logits, target, real)
        ctx.shares = 1 - epsilon - spread, spread
        ctx.mark_non_differentiable(nll)
        return (1 - epsilon - spread) * nll + spread * smooth, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, _: Any) -> Any:
        logits, target, real = ctx.saved_tensors
        weight = real * scale
        for rows in _chunks(logits):
            ctx.write_gradient(logits[rows], target[rows], weight[rows], *ctx.shares)
        return logits, None, None, None, None


def smoothed_loss(
    logits: Tensor, target: Tensor, epsilon: float, padding: int, compile: bool = False
) -> tuple[Tensor, Tensor]:
    """The sum over all positions of the smoothed loss, and of the one without smoothing, which has no gradient.

    The backward overwrites the logits.

    Args:
        logits: shape (N, V).
        target: indices of words, shape (N,).
        epsilon: how much of the target's share all words have.
        padding: the index of positions that do not count.
        compile: whether to work through torch.compile.
    """
    return _SmoothedLoss.apply(logits, target, epsilon, padding, compile)


STOCK = {way.get_normalized_probs for way in (BaseFairseqModel, TransformerModelBase, FairseqDecoder)}
"""Ways to log-probabilities that are a softmax of the output."""


def _gives_logits(model: Any) -> bool:
    """Whether fairseq's loss would take the softmax of a model's output, and nothing else."""
    decoder = getattr(model, "decoder", None)
    ways = [getattr(part.get_normalized_probs, "__func__", None) for part in (model, decoder) if part is not None]
    return len(ways) == 2 and STOCK.issuperset(ways) and getattr(decoder, "adaptive_softmax", None) is None


@register_criterion("label_smoothed_cross_entropy_fast", dataclass=LabelSmoothedCrossEntropyCriterionConfig)
class FastLabelSmoothedCrossEntropy(LabelSmoothedCrossEntropyCriterion):
    """fairseq's criterion, with its options; fairseq's computes for models of adaptive softmax and the like."""

    def compute_loss(
        self, model: Any, net_output: Any, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, Tensor]:
        """As fairseq's; with `reduce`, the backward overwrites the model's output."""
        if not (reduce and _gives_logits(model)):
            return super().compute_loss(model, net_output, sample, reduce=reduce)
        logits, target = net_output[0].flatten(0, -2), model.get_targets(sample, net_output)
        if self.ignore_prefix_size > 0:  # as if it were padding
            target = target.clone()
            target[:, : self.ignore_prefix_size] = self.padding_idx
        compile = getattr(getattr(model, "cfg", None), "admin_fast", None) == "compile" and model.training
        return smoothed_loss(logits, target.reshape(-1), self.eps, self.padding_idx, compile)
