"""Does the recipes' own training command train in bf16, where fairseq-train cannot, and otherwise the same?"""

from __future__ import annotations

import torch
from conftest import TRAIN

BF16 = ["--bf16", "--fp16-no-flatten-grads", "--max-update", "3"]


def test_bf16_trains(run, corpus, tmp_path):
    given = [corpus, *TRAIN, *BF16, "--save-dir", tmp_path / "run"]
    # Why the step is needed: the day this fails, fairseq-train has learnt it.
    assert run("fairseq_cli.train", *given).status != 0
    assert not (tmp_path / "run/checkpoint_last.pt").exists()
    done = run("recipes.steps.train_bf16", *given)
    assert done.status == 0, done.output
    state = torch.load(tmp_path / "run/checkpoint_last.pt", weights_only=False)
    assert state["cfg"]["common"]["bf16"] and not state["cfg"]["common"]["tpu"]
    # fairseq stores float32; the numbers are bf16's.
    weights = [tensor for name, tensor in state["model"].items() if "weight" in name]
    assert all(torch.equal(weight, weight.bfloat16().float()) for weight in weights)
    assert "Admin: profiled" in done.output and "num_updates: 3" in done.output


def test_without_bf16_it_is_fairseq_train(run, corpus, tmp_path):
    weights = []
    for name, module in (("stock", "fairseq_cli.train"), ("step", "recipes.steps.train_bf16")):
        done = run(module, corpus, *TRAIN, "--max-update", 3, "--save-dir", tmp_path / name)
        assert done.status == 0, done.output

        weights.append(torch.load(tmp_path / name / "checkpoint_last.pt", weights_only=False)["model"])
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_wrong_options_end_as_with_fairseq_train(run, corpus, tmp_path):
    done = run(
        "recipes.steps.train_bf16", corpus, *TRAIN, "--bf16", "--admin-profile-tokens", 0, "--save-dir", tmp_path
    )
    assert done.status == 2 and done.output.splitlines()[-1].startswith("fairseq-admin: --admin-profile-tokens is 0")
