"""Admin in models of torch and transformers: attach, train and fold, against plain references."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from post_ln import NAMES, PADDED, C, Layer, Stack, WrittenOut, X, build, layer, output, trained, with_omega
from torch import nn

import fairseq_admin.pytorch as admin


def hooks(model):
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize("name", NAMES)
def test_attached_is_stock_and_folded_is_stock(name):
    model, batch = build(name, torch.float32)
    stock, gradients = output(model, batch), []
    keys, hung, modes = list(model.state_dict()), hooks(model), [module.training for module in model.modules()]
    nested, parameters = getattr(model, "use_nested_tensor", None), [*map(id, model.parameters())]
    state = torch.get_rng_state()
    assert admin.attach(model, batch, omega=1) is model
    assert torch.equal(torch.get_rng_state(), state) and [m.training for m in model.modules()] == modes
    assert [*map(id, model.parameters())] == parameters  # so an optimizer may be made before
    assert torch.equal(output(model, batch), stock)
    for again in (model, build(name, torch.float32)[0]):
        output(again, batch).square().mean().backward()
        gradients.append({name: p.grad for name, p in again.named_parameters() if p.grad is not None})
    attached, expected = gradients
    assert attached.keys() == expected.keys() and all(torch.equal(attached[key], expected[key]) for key in expected)
    admin.fold(model, batch)
    assert list(model.state_dict()) == keys and hooks(model) == hung
    assert getattr(model, "use_nested_tensor", None) is nested
    assert torch.equal(output(model, batch), stock)


@pytest.mark.parametrize("name", NAMES)
def test_fold_in_float64(name):
    model, batch = trained(name)
    model.eval()
    before, weights = output(model, batch), copy.deepcopy(model.state_dict())
    folded = admin.folded_state_dict(model)
    assert torch.equal(output(model, batch), before)
    assert not {t.data_ptr() for t in folded.values()} & {t.data_ptr() for t in model.state_dict().values()}
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in weights.items())
    stock = build(name)[0].eval()
    stock.load_state_dict(folded)
    for encoder in [module for module in stock.modules() if isinstance(module, nn.TransformerEncoder)]:
        encoder.use_nested_tensor = False  # with it, torch's encoder returns 0 at padding
    # A few sub-layers, each with a few roundings of 1e-16.
    assert (output(stock, batch) - before).abs().max() < 1e-12
    assert (before - output(build(name)[0].eval(), batch)).abs().max() > 1e-3
    admin.fold(model, batch)
    assert torch.equal(output(model.eval(), batch), output(stock, batch)) or name == "encoder"


def test_loss_and_gradients_are_those_of_a_model_written_out():
    model, batch = trained("bert")
    written = WrittenOut(build("bert")[0], admin.omegas(model).values())
    losses = []
    for either in (model, written):
        torch.manual_seed(4)
        losses.append(either(**batch).loss)
        losses[-1].backward()
    # BERT's eps of 1e-12 is in one model next to Var[ωx + f], in the other next to Var[x + f/ω].
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-10)
    for name, parameter in written.model.named_parameters():
        assert (parameter.grad - model.get_parameter(name).grad).abs().max() < 1e-10, name


@pytest.mark.parametrize(
    "rule, value", [("log", 1.6116105), ("constant", math.sqrt(6)), ("linear", 1.0), (2.5, 2.5), (9, 9.0)]
)
def test_omega_by_a_rule_or_a_number(rule, value):
    """For six sub-layers (formulas: test_omega.py); the first of the stack, whose input no norm wrote, has it, too."""
    model, batch = build("encoder")
    admin.attach(model, batch, omega=rule)
    assert [omega.item() for omega in admin.omegas(model).values()] == 6 * [pytest.approx(value)]
    assert all(omega.shape == () and not omega.requires_grad for omega in admin.omegas(model).values())


@pytest.mark.parametrize("padded", [True, False])
def test_the_fast_path_of_torchs_layers_is_off(padded):
    """Without gradients, torch's encoder has a forward of its own, in which no submodule runs."""
    model, batch = trained("encoder", dropout=0.0)
    batch = batch if padded else {"src": batch["src"]}
    expected = output(model, batch)
    with torch.no_grad():
        found = output(model.eval(), batch)
        stock = output(build("encoder")[0].eval(), batch)
    real = (PADDED > 0 if padded else PADDED > -1)[..., None]
    assert ((found - expected) * real).abs().max() < 1e-12 < 1e-3 < ((found - stock) * real).abs().max()


def test_deep_copies_are_apart():
    model, batch = build("bart")
    admin.attach(model, batch, omega=1)
    copied = with_omega(copy.deepcopy(model))
    assert all(omega == 1 for omega in admin.omegas(model).values())
    assert not torch.equal(output(copied, batch), output(model, batch))
    admin.fold(copied, batch)
    assert len(admin.omegas(model)) == 10 and hooks(model) > hooks(copied)


def test_state_dicts():
    """A state dict restores ω. Where ω would be lost, a strict load refuses; one of 0.3.0 is named."""
    model, batch = trained("bert")
    again, _ = build("bert")
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \S+admin_omega"):
        again.load_state_dict(model.state_dict())
    stock = again.state_dict()
    admin.attach(again, batch)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \S+admin_omega"):
        again.load_state_dict(stock)
    again.load_state_dict(model.state_dict())
    assert torch.equal(output(again, batch), output(model, batch))
    old = {"bert.encoder.layer.0.output.LayerNorm.omega_delta": torch.zeros(16)}
    with pytest.raises(
        ValueError, match=r"^bert\S+omega_delta: a state dict of version 0\.3\.0, .* keep_function=True"
    ):
        again.load_state_dict(stock | old, strict=False)


def test_beam_search_is_the_same_after_the_fold():
    model, batch = trained("bart")
    model.eval()
    options = {"num_beams": 3, "max_new_tokens": 12, "min_new_tokens": 8}
    source = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    before = model.generate(**source, **options)
    admin.fold(model)
    assert torch.equal(model.generate(**source, **options), before)


def functional(self, x):
    return x.tanh() @ self.w


@pytest.mark.parametrize("make", [Layer, layer(feed=functional, parts={"w": lambda: nn.Parameter(torch.randn(C, C))})])
def test_the_function_is_kept(make):
    """Attached with `keep_function`, a trained or folded model computes the same: its writers are ω times larger."""
    model = with_omega(admin.attach(Stack(make), X))
    model.layers[2].b.weight.data[3] += 1e-3
    before = model(X)
    admin.fold(model)
    with pytest.raises(ValueError, match=r"^layers\.2\.b differs between channels: the model has been trained"):
        admin.attach(model, X)
    writer = model.layers[1].attn.out_proj.weight.clone()
    admin.attach(model, X, omega=4, keep_function=True)
    assert (model(X) - before).abs().max() < 1e-12 and all(omega == 4 for omega in admin.omegas(model).values())
    torch.testing.assert_close(model.layers[1].attn.out_proj.weight, 4 * writer)
    assert (admin.fold(model, X)(X) - before).abs().max() < 1e-12
