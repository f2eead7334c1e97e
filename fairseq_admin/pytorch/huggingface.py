"""Admin under Hugging Face's Trainer. The only file here that imports transformers.

admin.attach(model, batch)
Trainer(model, args, train_dataset=data, callbacks=[AdminCallback()]).train()
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..core.omega import omega_summary
from .attaching import attached, folded_state_dict, omegas, unfoldable
from .profiling import profile

logger = logging.getLogger(__name__)
FOLDED = "folded"
"""The folder of the stock model in each checkpoint."""


class AdminCallback(TrainerCallback):
    """Logs ω of an attached model and saves a folded copy in each checkpoint. If it has a rule, it profiles first.

    The Trainer's checkpoints hold ω, and resuming restores it exactly. But from_pretrained drops ω, so load the folder
    `folded` of a checkpoint later: it holds a stock model.

    Args:
        rule: the rule of `profile`, which runs on the first training batch unless the run is resumed. None: ω stays as
            `attach` or load_state_dict left it.
    """

    def __init__(self, rule: str | None = None) -> None:
        self.rule = rule

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model, _ = attached(kwargs["model"])
        if self.rule is None or state.global_step > 0:
            return
        with torch.random.fork_rng():  # so that training draws the same batch again
            batch = next(iter(kwargs["train_dataloader"]))
        profile(model, tree_map_only(torch.Tensor, lambda value: value.to(args.device), dict(batch)), rule=self.rule)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        summary = omega_summary(torch.cat(list(omegas(kwargs["model"]).values())))
        state.log_history[-1].update({f"omega_{key}": value for key, value in summary.items()})

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
