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
from fairseq import checkpoint_utils
from fairseq.trainer import Trainer

from recipes.steps.common import STOP

CHECKPOINTS = "checkpoint_stopped_*.pt"


class Stopped(Exception):
    """The training has stopped, and its checkpoint is written."""


class StoppableTrainer(Trainer):
    """fairseq's trainer, in which all processes of a training stop after the same update.

    In every update and validation, fairseq sums statistics over all processes. The requests to stop are one more term,
    so they need no extra communication, and no checkpoint contains them.
    """

    requested = False
    requests: Any = 0

    @property
    def stopping(self) -> bool:
        return bool(self.requests if self.data_parallel_world_size > 1 else StoppableTrainer.requested)

    def _aggregate_logging_outputs(self, logging_outputs: Any, *summed: Any, ignore: bool = False) -> tuple[Any, Any]:
        summed = (*summed, float(StoppableTrainer.requested))
        outputs, (*sums, self.requests) = super()._aggregate_logging_outputs(logging_outputs, *summed, ignore=ignore)
        return outputs, sums

    def load_checkpoint(self, *args: Any, **options: Any) -> Any:
        state = super().load_checkpoint(*args, **options)
        if self._previous_training_time > 1e9:  # up to version 0.3.0, a request was 1e12 s of training time
            self._previous_training_time %= 1e6
        return state

    def save_before_stop(self, batches: Any) -> None:
        folder = Path(self.cfg.checkpoint.save_dir)
        path = folder / f"checkpoint_stopped_{batches.epoch}_{self.get_num_updates()}.pt"
        state = {"train_iterator": batches.state_dict(), "val_loss": None}
        if hasattr(checkpoint_utils.save_checkpoint, "best"):
            state["best"] = checkpoint_utils.save_checkpoint.best
        self.consolidate_optimizer()
        self.save_checkpoint(str(path), state)
        if self.should_save_checkpoint_on_current_rank:
            for old in set(folder.glob(CHECKPOINTS)) - {path}:
                old.unlink()


def _stopping(validate_and_save: Callable) -> Callable:
    """Wrap fairseq's function that ends each update: stop the training if any process received a signal."""

    def stopping(cfg: Any, trainer: Any, task: Any, batches: Any, *options: Any) -> Any:
        losses, is_last = validate_and_save(cfg, trainer, task, batches, *options)
        if not is_last and trainer.stopping:
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
