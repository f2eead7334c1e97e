"""T-Fixup's schedule without warm-up, and training with every scheme and every optimizer."""

from __future__ import annotations

from argparse import Namespace

import pytest
import reference
import torch
from fairseq.optim import build_optimizer
from fairseq.optim.lr_scheduler import build_lr_scheduler
from kinds import KINDS, STILL
from torch import nn

from fairseq_admin.errors import AdminError
from fairseq_admin.method.schemes import MODEL_SCHEMES

OPTIMIZERS = {
    "radam": {"adam_betas": "(0.9, 0.98)", "adam_eps": 1e-8, "weight_decay": 0.0001},
    "adam": {"adam_betas": "(0.9, 0.98)", "adam_eps": 1e-8, "weight_decay": 0.0001, "use_old_adam": True},
    "sgd": {"momentum": 0.9, "weight_decay": 0.0001},
}


def optimizer_of(name, parameters, lr):
    defaults = {"tpu": False, "fp16_adam_stats": False, "use_old_adam": False, "distributed_world_size": 1}
    return build_optimizer(Namespace(optimizer=name, lr=[lr], **{**defaults, **OPTIMIZERS[name]}), list(parameters))


# Schedules ---------------------------------------------------------------------------------------------------------


def rates(updates, **options):
    """The learning rate of each update. As fairseq's trainer does, ask for it at the start and after every update."""
    optimizer = optimizer_of("sgd", [nn.Parameter(torch.zeros(1))], 8e-4)
    scheduler = build_lr_scheduler(Namespace(lr=[8e-4], force_anneal=None, lr_shrink=0.1, **options), optimizer)
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
        build_lr_scheduler(Namespace(**settings), optimizer_of("sgd", [nn.Parameter(torch.zeros(1))], 8e-4))


# Optimizers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "name"), [*((scheme, "radam") for scheme in MODEL_SCHEMES), ("admin", "adam"), ("admin", "sgd")]
)
def test_every_scheme_and_every_optimizer_trains(scheme: str, name: str):
    """On one batch without dropout, the loss falls within three updates."""
    model = KINDS["translation"].build(admin_scheme=scheme, **STILL)
    optimizer = optimizer_of(name, model.parameters(), {"radam": 1e-3, "adam": 1e-4, "sgd": 1e-2}[name])
    src, lengths, prev = reference.batch(padded=False)
    losses = []
    # RAdam makes no step in its first five updates, while its variance is intractable: add five more.
    for _ in range(9 if name == "radam" else 4):
        optimizer.zero_grad()
        logits = model(src, lengths, prev)[0]
        losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), prev.roll(-1, 1).flatten()))
        optimizer.backward(losses[-1])
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
    assert losses[-1] < losses[0] and all(p.isfinite().all() for p in model.parameters()), losses
