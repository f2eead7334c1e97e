"""A training step's forward and backward as CUDA graphs (`--admin-fast graph`), a pair for each shape of batch.

A small step leaves a GPU idle while the host starts some three thousand kernels. A CUDA graph starts them at once. The
first batch of a shape is computed as usual, the second is recorded, and from then on the graphs are replayed. A graph
reads its inputs, weights and the gradient of its loss from fixed places, and adds the gradients to fixed places.
architectures/shaped_pairs.py makes batches of few shapes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from fairseq.models import BaseFairseqModel
from fairseq.modules import LayerDropModuleList
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

logger = logging.getLogger(__name__)

MOST = 64
"""Maximum number of pairs of graphs."""

Losses = tuple[Tensor, Tensor]
"""The loss with smoothing and without it, each summed over positions. Scalars."""


def obstacles(model: Any) -> list[str]:
    """Reasons why the steps of this model cannot be recorded."""
    if not isinstance(model, BaseFairseqModel):
        return ["several processes"]
    reasons = {
        "the CPU": not next(model.parameters()).is_cuda,
        "--amp": torch.is_autocast_enabled("cuda"),
        "layerdrop": any(isinstance(module, LayerDropModuleList) for module in model.modules()),
        "--checkpoint-activations": model.cfg.checkpoint_activations,
    }
    return [reason for reason, holds in reasons.items() if holds]


def count_hooks(model: nn.Module) -> int:
    """Count the hooks on a model's forward."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def record(function: Callable[[], Any], steps: RecordedSteps) -> tuple[Any, Callable[[], None]]:
    """Record the kernels that a function starts. None of them runs yet.

    Returns:
        The function's result, whose tensors each replay overwrites, and the replay.
    """
    graph = steps.latest = torch.cuda.CUDAGraph()
    # Threads that load data may use the GPU meanwhile. After an invalid call, torch does not leave its own stream.
    recording = torch.cuda.graph(graph, pool=steps.pool, capture_error_mode="thread_local")
    with torch.cuda.stream(torch.cuda.current_stream()), recording:
        result = function()
    return result, graph.replay


class _Pair:
    """The recorded forward and backward of one shape of batch."""

    def __init__(self, losses_of: Callable[..., Losses], batch: dict[str, Tensor], steps: RecordedSteps) -> None:
        self.batch = {name: tensor.clone() for name, tensor in batch.items()}
        (loss, nll), self.replay_forward = record(lambda: losses_of(**self.batch), steps)
        self.losses, self.scale = (loss.detach(), nll.detach()), torch.ones_like(loss)

        def backward() -> None:
            gradients = torch.autograd.grad(loss, list(steps.gradients), self.scale, allow_unused=True)
            pairs = [(total, new) for total, new in zip(steps.gradients.values(), gradients) if new is not None]
            torch._foreach_add_(*map(list, zip(*pairs)))

        _, self.replay_backward = record(backward, steps)


class _Replay(torch.autograd.Function):
    """Replays a pair. `anchor` only makes autograd call the backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, pair: _Pair, steps: RecordedSteps) -> Losses:
        ctx.pair, ctx.steps = pair, steps
        pair.replay_forward()
        loss, nll = (value.clone() for value in pair.losses)
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, _: Any) -> Any:
        ctx.pair.scale.copy_(scale)
        ctx.steps.attach_gradients()
        ctx.pair.replay_backward()
        return None, None, None


class RecordedSteps:
    """The pairs of one model.

    Attributes:
        model: the model.
        recordable: whether its steps can be recorded. The log says why not.
        pairs: by shape; None if the recording of the shape failed.
        gradients: for each parameter, the tensor to which all backwards add.
        pool: memory that all graphs share, because only one of them runs at a time.
        latest: the last graph whose recording began.
        broken: graphs whose recording an invalid call ended. They stay, because torch's allocator may still read them.
        anchor: see `_Replay`.
    """

    latest: Any = None

    def __init__(self, model: Any, reasons: list[str]) -> None:
        self.model, self.recordable = model, not reasons
        self.pairs: dict[Any, _Pair | None] = {}
        self._seen: Counter[Any] = Counter()
        self.broken: list[Any] = []
        if reasons:
            logger.info("Admin: --admin-fast graph: steps are not recorded, because of %s", ", ".join(reasons))
            return
        logger.info("Admin: --admin-fast graph: steps are recorded, for up to %d shapes of batch", MOST)
        self.gradients = {p: torch.zeros_like(p) for p in model.parameters() if p.requires_grad}
        self.pool = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None
        self.anchor = torch.zeros((), device=next(model.parameters()).device, requires_grad=True)

    def losses(self, losses_of: Callable[..., Losses], batch: dict[str, Tensor]) -> Losses | None:
        """The losses of a batch, by replay; None if the batch is to be computed as usual.

        Args:
            losses_of: computes the losses of a batch. The graphs record its forward and its backward.
            batch: the arguments of `losses_of`.
        """
        if not self.recordable or not all(map(torch.is_tensor, batch.values())):
            return None
        # A replay would call neither the monitor nor hooks. The model's built-in hooks compute, so they are recorded.
        if self.model.monitor.due or count_hooks(self.model) > self.model.built_in_hooks:
            return None
        if (pair := self.pair_for(losses_of, batch)) is None:
            return None
        for name, tensor in batch.items():
            pair.batch[name].copy_(tensor)
        return _Replay.apply(self.anchor, pair, self)

    def pair_for(self, losses_of: Callable[..., Losses], batch: dict[str, Tensor]) -> _Pair | None:
        """The pair of a batch's shape, or None. The second batch of a shape makes it.

        If there are `MOST` pairs, the new one replaces the one whose shape came least often, once its own came more
        often.
        """
        shape = tuple((name, tensor.shape, tensor.dtype) for name, tensor in batch.items())
        self._seen[shape] += 1
        rarest = min(self.pairs, key=self._seen.__getitem__) if len(self.pairs) == MOST else None
        if shape not in self.pairs and self._seen[shape] > max(1, self._seen[rarest]):
            try:
                self.pairs[shape] = _Pair(losses_of, batch, self)
            except RuntimeError as error:
                self.pairs[shape] = None
                sizes = {name: tuple(size) for name, size, _ in shape}
                reason = str(error.__context__ or error).partition("\n")[0]
                logger.warning("Admin: --admin-fast graph: batches of %s are computed, not replayed: %s", sizes, reason)
                if not isinstance(error, torch.cuda.OutOfMemoryError):
                    # After an invalid call torch cannot use the pool, nor random numbers until another recording ends.
                    self.broken.append(self.latest)
                    self.pool = torch.cuda.graph_pool_handle()
                    record(self.anchor.detach().zero_, self)
            self.pairs.pop(rarest, None)
        return self.pairs.get(shape)

    @torch.no_grad()
    def attach_gradients(self) -> None:
        """Make each parameter's fixed tensor its `grad`. The gradient keeps its value, or is zero if there was none."""
        empty = []
        for p, total in self.gradients.items():
            if p.grad is None:
                empty.append(total)
            elif p.grad is not total:
                total.copy_(p.grad)
            p.grad = total
        if empty:
            torch._foreach_zero_(empty)
