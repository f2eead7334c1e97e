"""`--lr-scheduler inverse_sqrt_nowarmup`: a learning rate that falls from the first update on, for T-Fixup.

    lr · sqrt(P / (P + t))      after t updates; P is --decay-period

Formula and names are those of the authors' code (layer6ai-labs/T-Fixup, inverse_sqrt_nowarmup_schedule.py).
"""

from dataclasses import dataclass, field
from typing import List

from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer
from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler
from omegaconf import II

from .errors import AdminError


@dataclass
class DecayConfig(FairseqDataclass):
    decay_period: int = field(
        default=4000,
        metadata={"help": "updates until the learning rate is lr / sqrt(2); lr / 2 after three times as many"},
    )
    lr: List[float] = II("optimization.lr")


@register_lr_scheduler("inverse_sqrt_nowarmup", dataclass=DecayConfig)
class InverseSqrtNoWarmup(FairseqLRScheduler):
    """fairseq calls `step_update` before the first update with 0, and after each one with the number of updates."""

    def __init__(self, cfg: DecayConfig, optimizer: FairseqOptimizer) -> None:
        super().__init__(cfg, optimizer)
        if len(cfg.lr) > 1:
            raise AdminError(
                f"--lr has {len(cfg.lr)} rates, one an epoch; --lr-scheduler inverse_sqrt_nowarmup expects one. Give "
                "one, or --lr-scheduler fixed."
            )
        if cfg.decay_period < 1:
            raise AdminError(
                f"--decay-period is {cfg.decay_period}; expected at least 1 update. The authors have 4000."
            )

    def step_update(self, num_updates: int) -> float:
        period = self.cfg.decay_period
        self.optimizer.set_lr(self.cfg.lr[0] * (period / (period + num_updates)) ** 0.5)
        return self.optimizer.get_lr()
