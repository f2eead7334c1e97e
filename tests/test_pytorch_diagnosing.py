"""`diagnose`: a new model's reaction to noise, as Post-LN and with Admin; the model stays what it was."""

from __future__ import annotations

import copy

import pytest
import torch
from post_ln import build
from torch import nn

import fairseq_admin.pytorch as admin


def encoder(layers, drawn=True):
    """An nn.TransformerEncoder, each layer with weights of its own or, as torch makes it, copies of one; a batch."""
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(32, 2, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, layers)
    for weight in model.parameters() if drawn else ():
        if weight.dim() > 1:
            nn.init.xavier_uniform_(weight)
    return model, torch.randn(4, 16, 32)


@pytest.mark.parametrize("name", ["transformer", "bert"])
def test_the_model_is_as_it_was(name):
    model, batch = build(name, torch.float32)
    weights, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    result = admin.diagnose(model, batch)
    assert list(model.state_dict()) == list(weights)
    assert all(torch.equal(model.state_dict()[key], weight) for key, weight in weights.items())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state) and all(module.training for module in model.modules())
    omegas = admin.profile(admin.attach(model, batch), batch)
    assert {row.norm: row.omega for s in result.stacks for row in s} == {key: w.item() for key, w in omegas.items()}
    table = str(result).splitlines()
    assert [line.split()[0] for line in table if line.startswith("  ")] == [r.norm for s in result.stacks for r in s]
    assert sum(line.startswith("stack of ") for line in table) == len(result.stacks) == 1 + (name == "transformer")


def test_change_grows_with_depth_for_post_ln_and_not_with_admin():
    shallow, deep = (admin.diagnose(*encoder(layers)) for layers in (2, 24))
    assert shallow.stacks[0][-1].post_ln < 1.5 * shallow.stacks[0][-1].admin
    assert deep.stacks[0][-1].post_ln > 3 * deep.stacks[0][-1].admin
    assert "may well train" in str(shallow) and "attach and profile" in str(deep)


def test_layers_that_are_copies_get_no_advice():
    assert "No advice" in str(admin.diagnose(*encoder(4, drawn=False)))


def test_refused():
    layer = nn.TransformerEncoderLayer(32, 2, 64, norm_first=True, batch_first=True)
    with pytest.raises(ValueError, match="Post-LN"):
        admin.diagnose(nn.TransformerEncoder(layer, 2), torch.randn(2, 3, 32))
    model, x = encoder(2)
    nn.init.constant_(model.layers[0].norm1.weight, 1.1)
    with pytest.raises(ValueError, match="has been trained"):
        admin.diagnose(model, x)
