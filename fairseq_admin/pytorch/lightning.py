"""Admin under Lightning. Only this file imports Lightning, as `lightning` or as `pytorch_lightning`.

Trainer(callbacks=[AdminCallback(batch, module="bert")]).fit(model, loader)
"""

from __future__ import annotations

import logging
from typing import Any

from .attaching import ATTACHED, OMEGA, attach, folded_state_dict, omega_range, unfoldable

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

logger = logging.getLogger(__name__)
FOLDED = "folded"
"""The key of the stock model's state dict in each checkpoint."""


class AdminCallback(Callback):
    """Attaches before the optimizer is made, logs ω's range, and puts the folded weights into each checkpoint.

    Args:
        batch: the arguments of the module's forward (see `batch`).
        module: the name of the module to attach to, in the LightningModule. "": the LightningModule itself.
        options: the options of `attach`.
    """

    def __init__(self, batch: Any, module: str = "", **options: Any) -> None:
        self.batch, self.module, self.options = batch, module, options

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        model = pl_module.get_submodule(self.module)
        if stage == "fit" and ATTACHED not in vars(model):
            attach(model, self.batch, **self.options)
        elif stage != "fit":  # whether a checkpoint will be loaded, and has ω, is not known yet
            model.register_load_state_dict_pre_hook(self.attach_for_weights)

    def attach_for_weights(self, model: Any, weights: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Hook of load_state_dict: attach a model that is about to get ω, to test it in a new process."""
        if ATTACHED not in vars(model) and any(key.startswith(prefix) and key.endswith(OMEGA) for key in weights):
            attach(model, self.batch, **{**self.options, "omega": 1})

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        if trainer.global_step % trainer.log_every_n_steps == 0:
            pl_module.log_dict(omega_range(pl_module.get_submodule(self.module)))

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        model = pl_module.get_submodule(self.module)
        if kept := unfoldable(model):
            logger.warning("Admin: no folded weights in the checkpoint: %s", kept)
        else:
            checkpoint[FOLDED] = folded_state_dict(model)
