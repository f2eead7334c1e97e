"""Models pruned on loading, as for LayerDrop: any layers may stay, and they keep their learned omega."""

from __future__ import annotations

from pathlib import Path

import pytest
import reference
import torch
from conftest import train
from kinds import KINDS, logits
from torch import nn

from fairseq_admin import cli
from fairseq_admin.checkpoints import files
from fairseq_admin.method.norms import shortcut_norms
from fairseq_admin.method.schemes import stacks_of
from fairseq_admin.method.state_dict import omegas

TRANSLATION = KINDS["translation"]


def without(model: nn.Module, side: str, keep: list[int]) -> nn.Module:
    """The model with the other layers removed by hand. The pruned model must compute the same."""
    stack = stacks_of(model)[side]
    stack.layers = nn.ModuleList(stack.layers[i] for i in keep)
    return model


CASES = [
    ("translation", "encoder", "1"),
    ("translation", "decoder", "2,1"),
    ("language", "decoder", "1,2"),
    ("masked", "encoder", "2"),
]


@pytest.mark.parametrize("name, side, keep", CASES)
def test_kept_layers_compute_the_same(name: str, side: str, keep: str) -> None:
    """A stack pruned of its first layer gives the same logits, bit for bit, as with that layer removed by hand."""
    kind = KINDS[name]
    depth = {f"{side}_layers": 3, "admin_init": "log"}
    whole = reference.scattered(kind.build(**depth))
    state = {key: tensor.clone() for key, tensor in whole.state_dict().items()}
    pruned = kind.build(seed=2, **depth, **{f"{side}_layers_to_keep": keep})
    pruned.load_state_dict(state)
    kept = sorted(map(int, keep.split(",")))
    expected = without(whole, side, kept)
    assert torch.equal(logits(pruned.eval(), kind.batch()), logits(expected.eval(), kind.batch()))
    first = shortcut_norms(stacks_of(pruned)[side])[0]
    assert first.omega_delta is None and first.omega.unique().numel() > 1
    assert torch.equal(first.omega, shortcut_norms(stacks_of(expected)[side])[0].omega)
    assert "omega_init" in dict(first.named_buffers()), "it is stored"


def test_pruned_weights_load_again() -> None:
    """Pruned weights load with the options that pruned them, and with the remaining depth."""
    state = TRANSLATION.build().state_dict()
    once = TRANSLATION.build(seed=2, decoder_layers_to_keep="1")
    once.load_state_dict(dict(state))
    for options in ({"decoder_layers_to_keep": "1"}, {"decoder_layers": 1}):
        again = TRANSLATION.build(seed=3, **options)
        again.load_state_dict(dict(once.state_dict()))
        assert all(torch.equal(tensor, again.state_dict()[key]) for key, tensor in once.state_dict().items())


def test_stock_weights_are_pruned_too() -> None:
    stock, words = TRANSLATION.stock().eval(), TRANSLATION.batch()
    pruned = TRANSLATION.build(seed=2, encoder_layers_to_keep="1,2").eval()
    pruned.load_state_dict(stock.state_dict())
    assert torch.allclose(logits(pruned, words), logits(without(stock, "encoder", [1, 2]), words))


# From the command line -----------------------------------------------------------------------------------------------


def test_a_pruned_model_is_fine_tuned_resumed_and_folded(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Does a fine-tuned pruned model have its smaller depth, resume with the same command, and fold?"""
    whole, tuned = tmp_path / "whole/checkpoint_last.pt", tmp_path / "tuned/checkpoint_last.pt"
    finetune = ["--disable-validation", "--decoder-layers-to-keep", 1, "--finetune-from-model", whole, "--max-update"]
    train(corpus, whole.parent, "--disable-validation", "--max-update", 10)
    train(corpus, tuned.parent, *finetune, 10)
    weights, state = files.read(whole)["model"], files.read(tuned)
    assert state["cfg"]["model"]["decoder_layers"] == 1 and state["cfg"]["model"]["decoder_layers_to_keep"] is None
    stays, learns = omegas(state["model"])["decoder"]["layers.0.self_attn"], "decoder.layers.0.fc1.weight"
    expected = omegas(weights)["decoder"]["layers.1.self_attn"].float().double()
    assert torch.equal(stays, expected) and stays.unique().numel() > 1
    assert not torch.equal(state["model"][learns], weights[learns.replace("0", "1")])

    train(corpus, tuned.parent, *finetune, 12)
    assert files.read(tuned)["optimizer_history"][-1]["num_updates"] == 12

    assert cli.main(["fold", str(tuned), "-o", str(tmp_path / "folded.pt")]) == 0, capsys.readouterr().err
