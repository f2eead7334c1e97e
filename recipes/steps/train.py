"""fairseq-train as the recipes need it, with the same options.

    python -m recipes.steps.train data-bin --user-dir fairseq_admin --arch transformer_admin_18l --save-dir RUN ...

It heeds neither --profile nor --use-plasma-view, and differs in five things:

- It goes on from the newest checkpoint in --save-dir (checkpoints.py), and does nothing if that is of update
  --max-update. The first process decides which one: on a network file system others may see an older listing.
- It stops early on SIGTERM or SIGUSR2 (early_stop.py), with a checkpoint and exit status 130.
- An update that is due a checkpoint (--save-interval-updates) has one also where it ends an epoch. fairseq leaves it to
  the epoch's checkpoint, which the recipes do without.
- --bf16 trains on a GPU. fairseq-train takes it for the wish to train on a TPU, fails without one, and leaves bf16 to
  fairseq-hydra-train, whose options have other names.
- A process that loads batches (--num-workers) leaves alone the garbage that it was forked with. Of an earlier epoch's
  processes, which it cannot wait for, torch would print tracebacks into the log.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

# At the top, also in a process that fairseq starts: it gives the log its form before anything is logged.
from fairseq_cli.train import main as fairseq_train  # isort: skip
import torch
from fairseq import checkpoint_utils, options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed.utils import call_main

from recipes.steps import early_stop
from recipes.steps.checkpoints import newest, reached
from recipes.steps.guard import await_files


class _WithinEpoch:
    """An iterator over epochs that is never at the end of one; all else as it is."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def end_of_epoch(self) -> bool:
        return False


def _numbering(save: Callable) -> Callable:
    """fairseq's save_checkpoint, which also numbers an update that ends an epoch without a checkpoint of its own."""

    @functools.wraps(save)
    def numbered(cfg: Any, trainer: Any, batches: Any, loss: Any) -> Any:
        of_epoch = not cfg.no_epoch_checkpoints and batches.epoch % cfg.save_interval == 0
        return save(cfg, trainer, batches if of_epoch else _WithinEpoch(batches), loss)

    return numbered


def agreed_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint, as the first process sees it.

    Raises:
        ValueError: this node does not see it.
    """
    checkpoint = [newest(folder)]
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(checkpoint, src=0)
    await_files(path for path in checkpoint if path)
    return checkpoint[0]


def train(cfg: Any, **options: Any) -> None:
    """fairseq's training; runs in every process that fairseq starts."""
    early_stop.install()
    checkpoint_utils.save_checkpoint = _numbering(checkpoint_utils.save_checkpoint)
    os.register_at_fork(after_in_child=gc.freeze)
    checkpoint = None
    if cfg.checkpoint.restore_file == "checkpoint_last.pt":
        checkpoint = agreed_checkpoint(Path(cfg.checkpoint.save_dir))
    if checkpoint:
        if 0 < cfg.optimization.max_update <= reached(checkpoint):
            return
        cfg.checkpoint.restore_file, cfg.checkpoint.finetune_from_model = str(checkpoint), None
    with suppress(early_stop.Stopped):
        fairseq_train(cfg, **options)
        early_stop.finish(Path(cfg.checkpoint.save_dir))


def main() -> None:
    args = options.parse_args_and_arch(options.get_training_parser())
    args.tpu = False
    early_stop.install()
    call_main(convert_namespace_to_omegaconf(args), train)
    if early_stop.happened(Path(args.save_dir)):
        raise SystemExit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
