"""Admin under Lightning: attach before the optimizer is made, resume, fold, and log ω."""

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
        self.names = [name for name, _ in self.named_parameters() if "omega" in name]
        return torch.optim.Adam(self.parameters(), lr=3e-3)


QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}


def fit(folder, steps, resume=None, **options):
    model = Model()
    saving = lightning.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    callbacks = [AdminCallback(model.batch, "bert", **options), saving]
    trainer = lightning.Trainer(max_steps=steps, callbacks=callbacks, log_every_n_steps=1, **QUIET)
    lightning.seed_everything(1)
    trainer.fit(model, torch.utils.data.DataLoader(range(4)), ckpt_path=resume)
    return model, trainer


@pytest.mark.parametrize("rule", [None, "reference"])
def test_resumed_is_uninterrupted_and_the_folded_weights_are_stock(tmp_path, rule):
    whole, trainer = fit(tmp_path / "whole", 2, rule=rule)
    assert len(whole.names) == 6 and trainer.callback_metrics["omega_max"] > 1
    first = admin.attach(build("bert", torch.float32)[0], whole.batch)
    constant = [omega[0].item() for omega in admin.omegas(first).values()]
    profiled = [buffer[0].item() for name, buffer in whole.named_buffers() if name.endswith("omega_init")]
    assert (profiled == constant) == (rule is None) and len(profiled) == 6
    part, _ = fit(tmp_path / "part", 1, rule=rule)
    resumed, _ = fit(tmp_path / "part", 2, tmp_path / "part" / "step=1.ckpt", rule=rule)
    for name, weight in part.named_buffers():
        assert "omega" not in name or torch.equal(weight, resumed.state_dict()[name])
    assert all(omega.std() > 0 for omega in admin.omegas(resumed.bert).values())
    saved = torch.load(tmp_path / "part" / "step=2.ckpt")["folded"]
    stock = build("bert", torch.float32)[0].eval()
    stock.load_state_dict(saved)
    # The bound allows for float32, in which the fold rounds weights once more.
    assert torch.allclose(output(stock, whole.batch), output(resumed.bert.eval(), whole.batch), atol=1e-4)


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
    assert all(map(torch.equal, admin.omegas(model.bert).values(), admin.omegas(trained.bert).values()))
    stock = Model()
    tested(stock)
    assert not any("omega" in name for name in stock.state_dict())


def test_a_batch_of_numbers_is_profiled_in_the_precision_of_the_model():
    class Encoder(Model):
        def __init__(self):
            lightning.LightningModule.__init__(self)
            self.bert, self.batch = build("encoder", torch.float32)

        def training_step(self, batch, index):
            batch = {key: value.bfloat16() if key == "src" else value for key, value in self.batch.items()}
            return self.bert(**batch).square().mean()

    model = Encoder()
    callback = AdminCallback(model.batch, "bert", rule="reference")
    options = {"max_steps": 1, "precision": "bf16-true", "enable_checkpointing": False}
    trainer = lightning.Trainer(callbacks=[callback], **options, **QUIET)
    trainer.fit(model, torch.utils.data.DataLoader(range(1)))
    first, *_, last = (omega[0].item() for omega in admin.omegas(model.bert).values())
    assert first == 1 < last
