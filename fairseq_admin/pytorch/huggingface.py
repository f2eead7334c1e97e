"""Admin under Hugging Face's Trainer. The only file here that imports transformers.

admin.attach(model, batch)
Trainer(model, args, train_dataset=data, callbacks=[AdminCallback()]).train()
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .attaching import attached, folded_state_dict, omega_range, unfoldable

logger = logging.getLogger(__name__)
FOLDED = "folded"
"""The folder of the stock model in each checkpoint."""


class AdminCallback(TrainerCallback):
    """Logs the range of ω of an attached model, and saves a folded copy in each checkpoint.

    The Trainer's checkpoints hold ω, and resuming restores it exactly. But from_pretrained drops ω, so load the folder
    `folded` of a checkpoint later: it holds a stock model.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        attached(kwargs["model"])  # raises an error if it is not

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        state.log_history[-1].update(omega_range(kwargs["model"]))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if kept := unfoldable(kwargs["model"]):
            logger.warning("Admin: no folded copy: %s", kept)
            return
        stock = folded_state_dict(kwargs["model"])  # every rank must call this: each may hold a shard
        if state.is_world_process_zero:
            folder = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}" / FOLDED
            part = folder.with_suffix(".part")
            for old in (part, folder):
                shutil.rmtree(old, ignore_errors=True)
            kwargs["model"].save_pretrained(part, state_dict=stock)
            if kwargs.get("processing_class") is not None:
                kwargs["processing_class"].save_pretrained(part)
            part.rename(folder)
