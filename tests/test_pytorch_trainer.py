"""Admin under Hugging Face's Trainer: kill and resume, folded copies, and logs."""

from __future__ import annotations

import json
import logging
import re

import pytest
import torch
from conftest import ROOT
from post_ln import PADDED, build, ids, output
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, Trainer, TrainerCallback, TrainingArguments

import fairseq_admin.pytorch as admin

Accelerator = pytest.importorskip("accelerate", reason="the Trainer needs accelerate").Accelerator
from fairseq_admin.pytorch.huggingface import AdminCallback  # noqa: E402

SENTENCES = [
    {"input_ids": words, "attention_mask": mask, "labels": words}
    for seed in range(8)
    for words, mask in zip(ids(seed), PADDED)
]


class Killed(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            raise KeyboardInterrupt


def trainer(folder, *callbacks, **options):
    model, batch = build("bert", torch.float32)
    admin.attach(model, batch)
    settings = {"max_steps": 8, "save_steps": 3, "logging_steps": 1, "learning_rate": 3e-3, "report_to": []}
    settings |= {"per_device_train_batch_size": 4, "use_cpu": True, "disable_tqdm": True, "weight_decay": 0.1}
    arguments = TrainingArguments(folder, **{**settings, **options})
    return Trainer(model, arguments, train_dataset=SENTENCES, callbacks=[AdminCallback(), *callbacks])


def test_killed_and_resumed_is_uninterrupted(tmp_path):
    whole = trainer(tmp_path / "whole")
    whole.train()
    killed = trainer(tmp_path / "killed", Killed())
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    resumed = trainer(tmp_path / "killed")
    resumed.train(resume_from_checkpoint=True)
    expected = whole.model.state_dict()
    for key, tensor in resumed.model.state_dict().items():
        assert torch.equal(tensor, expected[key]), key
    omegas = [tensor for key, tensor in expected.items() if key.endswith("admin_omega")]
    assert len(omegas) == 6 and all(omega.item() == pytest.approx(6**0.5) for omega in omegas)


def test_a_killed_save_leaves_no_folded_copy(tmp_path, monkeypatch):
    run = trainer(tmp_path, max_steps=3)
    save = run.model.save_pretrained

    def killed(folder, **options):
        save(folder, **options)
        if "folded" in str(folder):
            raise KeyboardInterrupt

    monkeypatch.setattr(run.model, "save_pretrained", killed)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert not (tmp_path / "checkpoint-3" / "folded").exists()


def test_folded_copies_and_logs(tmp_path, caplog):
    run = trainer(tmp_path)
    run.train()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        stock = AutoModelForMaskedLM.from_pretrained(tmp_path / "checkpoint-8" / "folded").eval()
    assert not caplog.records
    batch = {"input_ids": ids(), "attention_mask": PADDED}
    # The bound allows for the rounding of folded weights to float32.
    assert torch.allclose(output(stock, batch), output(run.model.eval(), batch), atol=1e-4)
    assert {path.name for path in (tmp_path / "checkpoint-3" / "folded").iterdir()} >= {
        "model.safetensors",
        "config.json",
    }
    rows = json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())["log_history"]
    assert rows[0]["omega_min"] == rows[0]["omega_max"] == pytest.approx(6**0.5)


def test_a_model_that_is_not_attached_is_refused_at_the_start(tmp_path):
    run = trainer(tmp_path, max_steps=1)
    run.model, run.training_step = admin.fold(run.model), None
    with pytest.raises(ValueError, match="^BertForMaskedLM is not attached"):
        run.train()


def test_under_accelerate():
    model, batch = build("bert", torch.float32)
    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(admin.attach(model, batch), torch.optim.AdamW(model.parameters(), 1e-2))
    accelerator.backward(prepared(**batch).loss)
    optimizer.step()
    before = output(model.eval(), batch)
    stock = admin.fold(accelerator.unwrap_model(prepared), batch)
    # The bound allows for the rounding of folded weights to float32.
    assert torch.allclose(output(stock, batch), before, atol=1e-4)


def test_the_pages_code_runs(tmp_path, monkeypatch):
    """The code on docs/pytorch.md's first screen runs."""
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"^```python\n(.+?)^```", (ROOT / "docs" / "pytorch.md").read_text(), flags=re.M | re.S)
    exec(block, {})
    assert not [key for key in load_file(tmp_path / "folded" / "model.safetensors") if "omega" in key]
