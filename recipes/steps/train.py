"""fairseq-train as the recipes need it, with the same options.

    python -m recipes.steps.train data-bin --user-dir fairseq_admin --arch transformer_admin_18l --save-dir RUN ...

It ignores --profile and --use-plasma-view, and differs from fairseq-train in five ways:

- It goes on from the newest whole checkpoint in --save-dir (checkpoints.py), and does nothing if that checkpoint has
  reached --max-update. The first process chooses the checkpoint, since other nodes of a network file system may see an
  older listing.
- It stops early on SIGTERM or SIGUSR2 (early_stop.py), with a checkpoint and exit status 130.
- It writes a checkpoint every --save-interval-updates updates, even if that update ends an epoch. fairseq-train writes
  only the epoch's checkpoint then, which the recipes have switched off.
- --bf16 trains on a GPU. fairseq-train takes it as a request for a TPU, and fails without one.
- A process that loads batches (--num-workers) does not collect the garbage that it inherits. The garbage includes
  the processes of earlier epochs; if the new process collected those, torch would print tracebacks into the log.
  It ignores SIGTERM, which Slurm sends to every process: without it, the update would fail that has to be finished.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import popen_fork
from pathlib import Path
from typing import Any

# Imported first, also in the processes that fairseq starts, because it sets the format of the log.
from fairseq_cli.train import main as fairseq_train  # isort: skip
import torch
from fairseq import checkpoint_utils, options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed.utils import call_main

from fairseq_admin.errors import AdminError
from recipes.steps import early_stop
from recipes.steps.checkpoints import newest_whole, reached
from recipes.steps.common import INTERRUPTED, STOP
from recipes.steps.guard import await_files


class _WithinEpoch:
    """Wraps fairseq's iterator over epochs so that it never reports the end of an epoch."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def end_of_epoch(self) -> bool:
        return False


def _numbering(save: Callable) -> Callable:
    """Wrap fairseq's save_checkpoint: if an epoch has no checkpoint, its last update is saved like any other update."""

    @functools.wraps(save)
    def numbered(cfg: Any, trainer: Any, batches: Any, loss: Any) -> Any:
        of_epoch = not cfg.no_epoch_checkpoints and batches.epoch % cfg.save_interval == 0
        return save(cfg, trainer, batches if of_epoch else _WithinEpoch(batches), loss)

    return numbered


def agreed_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint that the first process sees.

    Raises:
        AdminError: all are damaged.
        ValueError: this node does not see that checkpoint.
    """
    if not torch.distributed.is_initialized():
        return newest_whole(folder)
    checkpoint: list[Any] = [None]
    if torch.distributed.get_rank() == 0:
        try:
            checkpoint = [newest_whole(folder)]
        except AdminError as error:
            checkpoint = [error]
    torch.distributed.broadcast_object_list(checkpoint, src=0)
    if isinstance(checkpoint[0], AdminError):
        raise checkpoint[0]
    await_files(path for path in checkpoint if path)
    return checkpoint[0]


def _loading() -> None:
    """Prepare a process that loads batches."""
    gc.freeze()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP)


def train(cfg: Any, **options: Any) -> None:
    """Train. fairseq calls this function in every process that it starts."""
    early_stop.install()
    checkpoint_utils.save_checkpoint = _numbering(checkpoint_utils.save_checkpoint)
    os.register_at_fork(after_in_child=_loading)
    popen_fork.Popen.terminate = popen_fork.Popen.kill  # type: ignore[method-assign]  # it ends what ignores SIGTERM
    checkpoint = None
    if cfg.checkpoint.restore_file == "checkpoint_last.pt":
        checkpoint = agreed_checkpoint(Path(cfg.checkpoint.save_dir))
    if checkpoint:
        cfg.checkpoint.restore_file, cfg.checkpoint.finetune_from_model = str(checkpoint), None
    with suppress(early_stop.Stopped):
        if not checkpoint or not 0 < cfg.optimization.max_update <= reached(checkpoint):
            fairseq_train(cfg, **options)
        early_stop.finish(Path(cfg.checkpoint.save_dir))


def main() -> None:
    args = options.parse_args_and_arch(options.get_training_parser())
    args.tpu = False
    early_stop.install()
    call_main(convert_namespace_to_omegaconf(args), train)
    if early_stop.happened(Path(args.save_dir)):
        raise SystemExit(INTERRUPTED)


if __name__ == "__main__":
    main()
