"""Recorded steps without a GPU: a stand-in for the pairs of graphs.py, whose replay computes the step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fairseq_admin.fast import graphs, loss
from recipes.research.bench.speed import faked_device


class Computed:
    """Replaces a pair."""

    def __init__(self, losses_of: Callable[..., Any], batch: dict[str, Tensor], steps: graphs.RecordedSteps) -> None:
        self.batch = {name: tensor.clone() for name, tensor in batch.items()}
        self.losses_of, self.steps, self.scale = losses_of, steps, torch.ones(())

    def replay_forward(self) -> None:
        # nonzero waits for the device, which no graph can record
        with torch.enable_grad(), mock.patch.object(Tensor, "nonzero", None):
            self.loss, nll = self.losses_of(**self.batch)
        self.losses = self.loss.detach(), nll

    def replay_backward(self) -> None:
        totals = self.steps.gradients
        assert all(p.grad is total for p, total in totals.items())
        for total, gradient in zip(totals.values(), torch.autograd.grad(self.loss, list(totals))):
            total += self.scale * gradient


@contextlib.contextmanager
def recording_without_gpu() -> Iterator[None]:
    """Inside this context, --admin-fast graph records steps on a CPU."""
    replacements = [
        mock.patch.object(graphs, "_Pair", Computed),
        mock.patch.object(graphs, "record", lambda function, steps: (function(), function)),
        mock.patch.object(torch.cuda, "graph_pool_handle", object),
        mock.patch.object(loss, "obstacles", lambda model: []),
    ]
    with contextlib.ExitStack() as stack, faked_device():
        for replacement in replacements:
            stack.enter_context(replacement)
        yield
