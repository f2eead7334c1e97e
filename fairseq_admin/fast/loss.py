"""`--criterion label_smoothed_cross_entropy_fast`: fairseq's loss, the plain one, without copies of the logits.

    loss = Σ (1 - ε - ε_i) · (lse(x) - x_target) + ε_i · Σ_v (lse(x) - x_v),   ε_i = ε / (V - 1)
    gradient = softmax(x) - (1 - ε - ε_i) · [v = target] - ε_i

where x are the logits of a position, V is the number of words, and padding is left out of the sum over positions.
fairseq keeps float32 log-probabilities in addition to the logits, and its backward allocates as much memory again. Here
only the logits are kept, the gradient overwrites them, and the rest is computed a few rows at a time.

torch's linear_cross_entropy and liger-kernel do not return the loss without smoothing, which the log needs.
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
from fairseq.logging import metrics
from fairseq.models import BaseFairseqModel, FairseqDecoder
from fairseq.models.transformer import TransformerModelBase
from torch import Tensor
from torch.autograd.function import once_differentiable

from .graphs import RecordedSteps, obstacles

CHUNK = {"cpu": 2**20, "cuda": 2**26}
"""Logits processed at a time: on a CPU some MB, which fit its cache; on a GPU enough to keep it busy."""


def _chunks(logits: Tensor) -> Iterator[slice]:
    rows = max(1, CHUNK.get(logits.device.type, 2**24) // logits.size(1))
    return (slice(start, start + rows) for start in range(0, len(logits), rows))


def row_sums(logits: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    """Log-probability of the target, and the sum over all words. Shapes (N, V) and (N, 1), results (N, 1)."""
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
    def forward(ctx: Any, logits: Tensor, target: Tensor, epsilon: float, padding: int) -> Any:
        spread = epsilon / (logits.size(1) - 1)
        target = target.unsqueeze(1)
        real = target.ne(padding)
        sums = [row_sums(logits[rows], target[rows]) for rows in _chunks(logits)]
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
            write_gradient(logits[rows], target[rows], weight[rows], *ctx.shares)
        return logits, None, None, None


def smoothed_loss(logits: Tensor, target: Tensor, epsilon: float, padding: int) -> tuple[Tensor, Tensor]:
    """The loss with and without smoothing, summed over positions. The second has no gradient.

    The backward overwrites the logits.

    Args:
        logits: shape (N, V).
        target: indices of words, shape (N,).
        epsilon: the smoothing.
        padding: the target of positions that do not count.
    """
    return _SmoothedLoss.apply(logits, target, epsilon, padding)


STOCK = {way.get_normalized_probs for way in (BaseFairseqModel, TransformerModelBase, FairseqDecoder)}
"""Methods that compute log-probabilities by a plain log-softmax of the output."""


def _gives_logits(model: Any) -> bool:
    """Whether fairseq's loss would take a plain softmax of the model's output."""
    decoder = getattr(model, "decoder", None)
    ways = [getattr(part.get_normalized_probs, "__func__", None) for part in (model, decoder) if part is not None]
    return len(ways) == 2 and STOCK.issuperset(ways) and getattr(decoder, "adaptive_softmax", None) is None


@register_criterion("label_smoothed_cross_entropy_fast", dataclass=LabelSmoothedCrossEntropyCriterionConfig)
class FastLabelSmoothedCrossEntropy(LabelSmoothedCrossEntropyCriterion):
    """fairseq's criterion, with its options. For an adaptive softmax and the like, fairseq's own code runs."""

    steps: RecordedSteps | None = None
    replayed: Any = None
    """The losses of the current batch, if they came from a replay."""

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> Any:
        """Compute the loss as fairseq does. With `--admin-fast graph` a training step is replayed."""
        self.replayed = self._replayed(model, sample) if reduce and model.training else None
        computed = model if self.replayed is None else lambda **_: self.replayed
        loss, size, log = super().forward(computed, sample, reduce=reduce)
        if model.training and self.steps is not None and self.steps.recordable:
            log["replayed"] = int(self.replayed is not None)
        return loss, size, log

    @classmethod
    def reduce_metrics(cls, logging_outputs: Any) -> None:
        """Log what fairseq's criterion logs, and the share of batches that were replayed."""
        super().reduce_metrics(logging_outputs)
        replayed = [log["replayed"] for log in logging_outputs if "replayed" in log]
        if replayed:
            metrics.log_scalar("replayed", sum(replayed) / len(replayed), len(replayed), round=3)

    def _replayed(self, model: Any, sample: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
        """The losses of a recorded step, or None if the step is to be computed."""
        if getattr(getattr(model, "cfg", None), "admin_fast", None) != "graph":
            return None
        if self.steps is None or self.steps.model is not model:
            reasons = {"--report-accuracy": self.report_accuracy, "an adaptive softmax": not _gives_logits(model)}
            self.steps = RecordedSteps(model, obstacles(model) + [reason for reason, holds in reasons.items() if holds])
        batch = {**sample["net_input"], "target": sample["target"]}

        def losses_of(target: Tensor, **net_input: Tensor) -> tuple[Tensor, Tensor]:
            return self.compute_loss(model, model(**net_input), {"target": target})

        return self.steps.losses(losses_of, batch)

    def compute_loss(
        self, model: Any, net_output: Any, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss as fairseq does. With `reduce` the backward overwrites the model's output."""
        if net_output is self.replayed:
            return net_output
        if not (reduce and _gives_logits(model)):
            return super().compute_loss(model, net_output, sample, reduce=reduce)
        logits, target = net_output[0].flatten(0, -2), model.get_targets(sample, net_output)
        if self.ignore_prefix_size > 0:  # as if it were padding
            target = target.clone()
            target[:, : self.ignore_prefix_size] = self.padding_idx
        return smoothed_loss(logits, target.reshape(-1), self.eps, self.padding_idx)
