"""On a signal to stop, a training finishes its current update, writes a checkpoint, and ends.

The checkpoint is checkpoint_stopped_EPOCH_UPDATE.pt. The next start goes on from it (checkpoints.newest). It is not
averaged, and a finished training removes it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fairseq_cli.train
from fairseq.trainer import Trainer

from recipes.steps.common import STOP

CHECKPOINTS = "checkpoint_stopped_*.pt"
REQUEST, THRESHOLD = 1e12, 1e9
"""Seconds added to the training time of a process that received a signal; seconds that no other time exceeds."""


class Stopped(Exception):
    """The training has stopped, and its checkpoint is written."""


class StoppableTrainer(Trainer):
    """fairseq's trainer, in which all processes of a training stop after the same update.

    In every update, fairseq sums the training time over all processes. A request to stop is added to that sum, so it
    needs no extra communication.
    """

    requested = False

    def _local_cumulative_training_time(self) -> float:
        return super()._local_cumulative_training_time() + REQUEST * StoppableTrainer.requested

    def save_before_stop(self, batches: Any) -> None:
        StoppableTrainer.requested, self._cumulative_training_time = False, None  # the checkpoint holds the true time
        folder = Path(self.cfg.checkpoint.save_dir)
        earlier = list(folder.glob(CHECKPOINTS))
        path = folder / f"checkpoint_stopped_{batches.epoch}_{self.get_num_updates()}.pt"
        self.consolidate_optimizer()
        self.save_checkpoint(str(path), {"train_iterator": batches.state_dict(), "val_loss": None})
        if self.should_save_checkpoint_on_current_rank:
            for old in set(earlier) - {path}:
                old.unlink()
        StoppableTrainer.requested = True


def _stopping(validate_and_save: Callable) -> Callable:
    """Wrap fairseq's function that ends each update: stop the training if any process received a signal."""

    def stopping(cfg: Any, trainer: Any, task: Any, batches: Any, *options: Any) -> Any:
        losses, is_last = validate_and_save(cfg, trainer, task, batches, *options)
        if not is_last and trainer.cumulative_training_time() > THRESHOLD:
            trainer.save_before_stop(batches)
            raise Stopped
        return losses, is_last

    return stopping


def install() -> None:
    """Make the training of this process stop early on a signal."""

    def request(*_: Any) -> None:
        StoppableTrainer.requested = True

    for number in STOP:
        signal.signal(number, request)
    if fairseq_cli.train.Trainer is Trainer:
        fairseq_cli.train.Trainer = StoppableTrainer
        fairseq_cli.train.validate_and_save = _stopping(fairseq_cli.train.validate_and_save)


def happened(folder: Path) -> bool:
    return StoppableTrainer.requested or any(folder.glob(CHECKPOINTS))


def finish(folder: Path) -> None:
    """Remove the checkpoints of early stops: the training is complete."""
    StoppableTrainer.requested = False
    for path in folder.glob(CHECKPOINTS):
        path.unlink(missing_ok=True)
