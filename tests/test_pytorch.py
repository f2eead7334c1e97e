"""Admin in models of torch and transformers: attach, profile, train and fold, against plain references."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from post_ln import NAMES, PADDED, QUIET, WrittenOut, build, output, trained
from torch import nn

import fairseq_admin.pytorch as admin


def hooks(model):
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize("name", NAMES)
def test_attached_is_stock_and_folded_is_stock(name):
    model, batch = build(name, torch.float32)
    stock, gradients = output(model, batch), []
    keys, hung, modes = list(model.state_dict()), hooks(model), [module.training for module in model.modules()]
    nested = getattr(model, "use_nested_tensor", None)
    state = torch.get_rng_state()
    assert admin.attach(model, batch, omega=1) is model
    assert torch.equal(torch.get_rng_state(), state) and [m.training for m in model.modules()] == modes
    assert torch.equal(output(model, batch), stock)
    for again in (model, build(name, torch.float32)[0]):
        output(again, batch).square().mean().backward()
        gradients.append({name: p.grad for name, p in again.named_parameters() if p.grad is not None})
    attached, expected = gradients
    for key, gradient in expected.items():
        # A shortcut's gradients are summed in another order; float32 has 24 bits.
        assert torch.allclose(attached[key], gradient, rtol=1e-4, atol=1e-6), key
    assert {key for key in attached if key not in expected} == {k for k in model.state_dict() if "omega_delta" in k}
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
    written = WrittenOut(build("bert")[0], list(admin.omegas(model).values()))
    losses = []
    for either in (model, written):
        torch.manual_seed(4)
        losses.append(either(**batch).loss)
        losses[-1].backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-12)
    expected = dict(written.model.named_parameters())
    expected |= zip((name for name, _ in model.named_parameters() if "omega" in name), written.omegas)
    for name, parameter in model.named_parameters():
        assert (parameter.grad - expected[name].grad).abs().max() < 1e-12, name


@pytest.mark.parametrize("rule, value", [("log", 1.6116105), ("constant", math.sqrt(6))])
def test_rules_by_depth(rule, value):
    """Rules by depth, for six sub-layers (formulas: test_omega.py). No norm wrote the first shortcut."""
    model, batch = build("encoder")
    admin.attach(model, batch, omega=rule)
    assert [omega[0].item() for omega in admin.omegas(model).values()] == [1.0, *5 * [pytest.approx(value)]]


def test_profiling_leaves_all_else_as_it_was():
    """Profiling changes only omega_init, not omega_delta.

    So an optimizer that copied the parameters before profiling cannot undo the profiling.
    """
    model, batch = build("bart", encoder_layerdrop=0.9, decoder_layerdrop=0.9)
    admin.attach(model, batch)
    model.model.encoder.layers[1].eval()
    weights, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    state, hung = torch.get_rng_state(), hooks(model)
    omegas = admin.profile(model, batch)
    assert torch.equal(torch.get_rng_state(), state) and hooks(model) == hung
    assert [module.training for module in model.modules()] == modes
    assert model.model.encoder.layerdrop == model.model.decoder.layerdrop == 0.9
    for key, tensor in model.state_dict().items():
        assert "omega_init" in key or torch.equal(tensor, weights[key]), key
    assert len(omegas) == 10 and all(parameter.grad is None for parameter in model.parameters())


def test_an_attention_mask_leaves_padding_out():
    """Words at padding change no omega."""
    model, batch = build("bert", **QUIET["bert"])
    admin.attach(model, batch)
    other = {**batch, "input_ids": batch["input_ids"].masked_fill(PADDED == 0, 7)}
    omegas, expected = (torch.stack(list(admin.profile(model, one).values())) for one in (other, batch))
    torch.testing.assert_close(omegas, expected, rtol=1e-6, atol=0)


def test_labels_say_where_a_decoder_is_padded():
    model, batch = build("bart", dropout=0.0)
    admin.attach(model, batch)
    by_labels = admin.profile(model, batch)
    by_mask = admin.profile(model, {**batch, "decoder_attention_mask": PADDED})
    # The mask also hides padding from attention, at positions that do not count.
    assert torch.equal(torch.stack(list(by_labels.values())), torch.stack(list(by_mask.values())))
    counted = admin.profile(model, {**batch, "labels": batch["labels"].clamp(min=1)})
    assert not torch.equal(torch.stack(list(by_labels.values())), torch.stack(list(counted.values())))
    with pytest.raises(ValueError, match="all padding to a stack"):
        admin.profile(model, {**batch, "labels": torch.full_like(batch["labels"], -100)})


def test_deep_copies_are_apart_and_nothing_of_a_forward_is_kept():
    model, batch = build("bart")
    admin.attach(model, batch, omega=1)
    output(model, batch)
    copied = copy.deepcopy(model)
    admin.profile(copied, batch)
    assert all((omega == 1).all() for omega in admin.omegas(model).values())
    assert not torch.equal(output(copied, batch), output(model, batch))
    admin.fold(copied, batch)
    assert len(admin.omegas(model)) == 10 and hooks(model) > hooks(copied)
    assert not any(site.shortcuts for site in model._admin.sites)


def test_state_dict_restores_omega():
    model, batch = trained("bert")
    again, _ = build("bert")
    admin.attach(again, batch)
    again.load_state_dict(model.state_dict())
    assert torch.equal(output(again, batch), output(model, batch))


def test_beam_search_is_the_same_after_the_fold():
    model, batch = trained("bart")
    model.eval()
    options = {"num_beams": 3, "max_new_tokens": 12, "min_new_tokens": 8}
    source = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    before = model.generate(**source, **options)
    admin.fold(model)
    assert torch.equal(model.generate(**source, **options), before)
