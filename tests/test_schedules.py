"""T-Fixup's schedule without warm-up."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from fairseq.optim import build_optimizer
from fairseq.optim.lr_scheduler import build_lr_scheduler
from torch import nn

from fairseq_admin.errors import AdminError


def optimizer():
    config = Namespace(optimizer="sgd", lr=[8e-4], momentum=0.9, weight_decay=0.0, tpu=False)
    return build_optimizer(config, [nn.Parameter(torch.zeros(1))])


def rates(updates, **options):
    """The learning rate of each update. As fairseq's trainer does, ask for it at the start and after every update."""
    scheduler = build_lr_scheduler(Namespace(lr=[8e-4], force_anneal=None, lr_shrink=0.1, **options), optimizer())
    scheduler.step_begin_epoch(1)
    return [scheduler.step_update(update) for update in range(updates)]


def test_inverse_sqrt_from_the_start():
    """The rate falls to sqrt(1/2) after P updates, 1/2 after 3 P, and 1/3 after 8 P: P / (P + 8 P) = 1 / 9."""
    computed = rates(33, lr_scheduler="inverse_sqrt_nowarmup", decay_period=4)
    assert [computed[t] for t in (0, 4, 12, 32)] == pytest.approx([8e-4, 8e-4 / 2**0.5, 4e-4, 8e-4 / 3], rel=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": [1e-3, 1e-4]}, "^--lr has 2 rates, one an epoch; "),
        ({"decay_period": 0}, "^--decay-period is 0; expected"),
    ],
)
def test_inverse_sqrt_from_the_start_refuses(options, message):
    settings = {"lr": [8e-4], "decay_period": 4, "lr_scheduler": "inverse_sqrt_nowarmup", **options}
    with pytest.raises(AdminError, match=message):
        build_lr_scheduler(Namespace(**settings), optimizer())
