"""Admin under Lightning: attach in `setup`, resume, fold, and log ω."""

from __future__ import annotations

import pytest
import torch
from post_ln import build, output

import fairseq_admin.pytorch as admin

lightning = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")
from fairseq_admin.pytorch.lightning import AdminCallback  # noqa: E402


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.bert, self.batch = build("bert", torch.float32)

    def training_step(self, batch, index):
        return self.bert(**self.batch).loss

    def test_step(self, batch, index):
        self.log("loss", self.bert(**self.batch).loss)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}


def fit(folder, steps, resume=None):
    model = Model()
    saving = lightning.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    callbacks = [AdminCallback(model.batch, "bert", omega=3), saving]
    trainer = lightning.Trainer(max_steps=steps, callbacks=callbacks, log_every_n_steps=1, **QUIET)
    lightning.seed_everything(1)
    trainer.fit(model, torch.utils.data.DataLoader(range(4)), ckpt_path=resume)
    return model, trainer


def test_a_resumed_run_has_its_omega_and_the_folded_weights_are_stock(tmp_path):
    _, trainer = fit(tmp_path, 1)
    assert trainer.callback_metrics["omega_min"] == trainer.callback_metrics["omega_max"] == 3
    resumed, _ = fit(tmp_path, 2, tmp_path / "step=1.ckpt")
    assert all(omega == 3 for omega in admin.omegas(resumed.bert).values())
    saved = torch.load(tmp_path / "step=2.ckpt")["folded"]
    stock = build("bert", torch.float32)[0].eval()
    stock.load_state_dict(saved)
    # The bound allows for float32, in which the fold rounds weights once more.
    assert torch.allclose(output(stock, resumed.batch), output(resumed.bert.eval(), resumed.batch), atol=1e-4)


def test_a_new_process_tests_a_checkpoint_with_its_omega(tmp_path):
    """A checkpoint with omega attaches the model. A stock model without a checkpoint stays as it is."""
    trained, trainer = fit(tmp_path, 1)
    loader = torch.utils.data.DataLoader(range(1))

    def tested(model, checkpoint=None):
        tester = lightning.Trainer(callbacks=[AdminCallback(model.batch, "bert")], **QUIET)
        (result,) = tester.test(model, loader, ckpt_path=checkpoint, verbose=False)
        return result["loss"]

    (expected,) = trainer.test(trained, loader, verbose=False)
    model = Model()
    assert tested(model, tmp_path / "step=1.ckpt") == expected["loss"]
    assert all(omega == 3 for omega in admin.omegas(model.bert).values())
    stock = Model()
    tested(stock)
    assert not any("omega" in name for name in stock.state_dict())
