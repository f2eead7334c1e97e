"""New layers on a pre-trained encoder: they match plain float64 code, and without them the model is stock."""

from __future__ import annotations

import copy
import math
import re
import shutil
from types import SimpleNamespace

import new_layers
import pytest
import reference
import torch
from language import batch
from new_layers import HEAD, build, pretrained
from reference import PAD
from test_schemes import MECHANISMS
from torch import nn

from fairseq_admin.errors import AdminError
from fairseq_admin.fast.attention import FastAttention
from fairseq_admin.fast.stacks import FastEncoder
from fairseq_admin.method import provenance
from fairseq_admin.method.schemes import MODEL_SCHEMES, SCHEMES
from fairseq_admin.radam import FairseqRAdam

NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "pooler_dropout": 0.0}
SCALED = ("self_attn.v_proj.weight", "self_attn.out_proj.weight", "fc1.weight", "fc2.weight")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return new_layers.binarised(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def task(data):
    return new_layers.task(data)


def loaded(task, **options):
    """A model with the pre-trained encoder's weights."""
    model = build(task, **options)
    model.load_state_dict(pretrained(task))
    return model


def some_words(count=4):
    return torch.randint(4, 44, (count, 9), generator=torch.Generator().manual_seed(1))


def sentences(task, data, count=None):
    """The training set's sentences, each of shape (1, T)."""
    dataset = new_layers.task(data).load_dataset("train")
    return [dataset[i]["net_input.src_tokens"][None] for i in dataset.ordered_indices()[:count]]


def features(model, words):
    """The encoder's output without dropout, float64. Shape (1, T, C)."""
    encoder = model.encoder.double().eval()
    with torch.no_grad():
        return encoder(words, features_only=True)[0]


# The measurement ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 30])
def test_mu_and_every_weight_are_the_formulas(count, task, data, caplog):
    """mu and all weights match the plain formula in float64. mu is the largest norm over all batches."""
    model = build(task, more_layers=3, more_scheme="dt-fixup", profile_sentences=count, admin_profile_tokens=100)
    drawn = {key: tensor.double().clone() for key, tensor in model.more.state_dict().items()}
    state = pretrained(task)
    rng_state = torch.get_rng_state()
    with caplog.at_level("INFO"):
        model.load_state_dict(state)
    assert f"on {count or 120} sentences in evaluation mode" in caplog.text
    assert model.training and torch.equal(torch.get_rng_state(), rng_state)
    scaled = {key: tensor.double().clone() for key, tensor in model.more.state_dict().items()}
    measured = sentences(task, data, count or None)
    mu = max(features(model, words).square().sum(-1).sqrt().max().item() for words in measured)
    record = provenance.decode(model.more.admin_provenance)
    assert record["scheme"] == "dt-fixup" and record["sentences"] == len(measured) == (count or 120)
    assert record["mu"] == pytest.approx(mu, rel=1e-6)  # the encoder ran in float32
    divisor = math.sqrt(3 * (4 * mu * mu + 2 * mu + 2))
    for key, tensor in drawn.items():
        if key != provenance.KEY:
            expected = tensor / divisor if key.endswith(SCALED) else tensor
            torch.testing.assert_close(scaled[key], expected, rtol=1e-6, atol=0, msg=key)


def test_dt_fixup_layers_have_no_norms(task):
    model = reference.scattered(build(task, more_layers=2, more_scheme="dt-fixup")).double().eval()
    words = batch(4, 9)
    words[words >= len(task.source_dictionary)] = 5
    x = torch.randn(4, 9, 32, dtype=torch.float64).masked_fill(words.eq(PAD)[:, :, None], 0)
    output = model.more.extend(words, x)
    expected = reference.layers_by_hand(model.more, x.transpose(0, 1), words.eq(PAD), reference.no_ln).transpose(0, 1)
    torch.testing.assert_close(output[words.ne(PAD)], expected[words.ne(PAD)], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("scheme", ["dt-fixup", "admin"])
def test_an_encoder_whose_output_is_not_finite_is_refused(scheme, task):
    model, state = build(task, more_layers=2, more_scheme=scheme), pretrained(task)
    state["encoder.sentence_encoder.layernorm_embedding.bias"].fill_(math.nan)
    with pytest.raises(AdminError, match="a finite number was expected"):
        model.load_state_dict(state)


def test_omega_is_measured_on_the_encoders_output(task, data):
    """ω matches a plain loop over the encoder's outputs, for as many sentences as fit the token budget."""
    used = sentences(task, data, 8)
    budget = len(used) * max(words.size(1) for words in used)
    model = loaded(task, more_layers=2, more_scheme="admin", admin_profile_tokens=budget)
    norms = [getattr(layer, f"{name}_layer_norm") for layer in model.more.layers for name in ("self_attn", "final")]
    omegas = [norm.omega_init[0].item() for norm in norms]
    record = provenance.decode(model.more.admin_provenance)
    assert record["rule"] == "reference" and record["sentences"] == len(used)
    words = nn.utils.rnn.pad_sequence([sentence[0] for sentence in used], batch_first=True, padding_value=PAD)
    profile = reference.Profile("reference", words.t().ne(PAD))
    x = features(model, words).transpose(0, 1)
    with torch.no_grad():
        reference.layers_by_hand(model.more.double(), x, words.eq(PAD), profile)
    assert omegas == pytest.approx(profile.omega, rel=1e-5) and omegas[0] == 1 and omegas[3] > omegas[1]


@pytest.mark.parametrize("scheme", [*MECHANISMS, *(name for name in SCHEMES if name not in MODEL_SCHEMES)])
def test_every_scheme_trains_on_a_frozen_encoder_and_loads_back(scheme, task):
    """A deep copy, such as --store-ema's, and a reloaded model both compute the same output."""
    model = build(task, more_layers=2, more_scheme=scheme, pretrained_lr_factor=0)
    names = model.state_dict().keys()
    model.load_state_dict(pretrained(task))
    assert model.state_dict().keys() == names  # fairseq drops the final norm of a version 1 stack
    model(some_words(), classification_head_name=HEAD)[0].square().mean().backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in model.more.parameters())
    assert all(p.grad is None for p in model.encoder.parameters())
    with torch.no_grad():
        for p in model.more.parameters():
            p.sub_(0 if p.grad is None else 0.1 * p.grad)
    others = (build(task, seed=2, more_layers=2, more_scheme=scheme), copy.deepcopy(model))
    first = model.eval()(some_words(), classification_head_name=HEAD)[0]
    for other in others:
        other.load_state_dict(model.state_dict())
        assert torch.equal(other.eval()(some_words(), classification_head_name=HEAD)[0], first)


@pytest.mark.parametrize("scheme", ["admin", "dt-fixup", "residual"])
def test_fast_new_layers_are_the_plain_ones(scheme, task):
    """Fast and plain layers give the same measurement and, up to float32 rounding, the same outputs and gradients."""
    words = some_words(6)
    words[2, 5:] = words[4, 3:] = 1
    outputs, gradients, records = [], [], []
    for fast in ("off", "on"):
        model = loaded(task, more_layers=3, more_scheme=scheme, pretrained_lr_factor=1, admin_fast=fast, **NO_DROPOUT)
        records.append(provenance.decode(model.more.admin_provenance))
        outputs.append(model(words, classification_head_name=HEAD)[0])
        outputs[-1].square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert isinstance(model.more, FastEncoder) and type(model.more.layers[0].self_attn) is FastAttention
    assert records[0] == records[1]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)
    largest = max(gradient.abs().max() for gradient in gradients[0])
    assert len(gradients[0]) > 40 and all((a - b).abs().max() < 1e-5 * largest for a, b in zip(*gradients))


# Stock and frozen -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"encoder_layerdrop": 0.5}])
def test_no_more_layers_is_stock(options, task):
    """Without new layers, the training forward and gradients equal those of fairseq's RoBERTa, bit for bit."""
    admin, stock = (loaded(task, arch=arch, pretrained_lr_factor=1, **options) for arch in ("deeper_admin", "roberta"))
    stock.load_state_dict(admin.state_dict())
    assert admin.state_dict().keys() == stock.state_dict().keys()
    outputs = []
    for model in (admin, stock):
        torch.manual_seed(3)
        outputs.append(model(some_words(6), classification_head_name=HEAD)[0])
        outputs[-1].square().mean().backward()
    assert torch.equal(*outputs)
    gradients = [[torch.zeros(1) if p.grad is None else p.grad for p in model.parameters()] for model in (admin, stock)]
    assert all(map(torch.equal, *gradients)) and max(gradient.abs().max() for gradient in gradients[0]) > 0


@pytest.mark.parametrize("options", [{"admin_fast": "on"}, {"checkpoint_activations": True}])
def test_a_frozen_encoder_costs_one_forward(options, task):
    """In training mode, a frozen encoder gives its evaluation-mode features and keeps no tensor for a backward."""
    features, kept = [], []
    for factor in (0, 1):
        model = loaded(task, pretrained_lr_factor=factor, **options)
        kept.append([])
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept[-1].append(x) or x, lambda x: x):
            features.append(model(some_words())[0])
    assert not kept[0] and kept[1] and not features[0].requires_grad
    assert torch.equal(features[0], model.eval()(some_words())[0]) and not torch.equal(*features)


def test_the_encoder_learns_at_its_share(task):
    """The encoder's learning rate is 0.008 times that of the new layers and the head."""
    config = {"adam_betas": "(0.9, 0.98)", "adam_eps": 1e-8, "weight_decay": 0.0, "lr": [1e-3]}
    model = build(task, more_layers=2, more_scheme="pre-ln", pretrained_lr_factor=0.008)
    optimizer = FairseqRAdam(SimpleNamespace(**config), list(model.parameters()))
    optimizer.set_lr(1e-3)
    rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        assert rates[p] == pytest.approx(8e-6 if name.startswith("encoder.") else 1e-3), name
    assert optimizer.get_lr() == 1e-3 and model.slower.used


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ({"more_scheme": "dt-fixup"}, "--more-layers is 0 and --more-scheme dt-fixup; expected both or neither"),
        ({"more_layers": -2, "more_scheme": "pre-ln"}, "--more-layers is -2; expected at least 0"),
        ({"profile_sentences": -30}, "--profile-sentences is -30; expected at least 0"),
        ({"more_layers": 2, "more_scheme": "pre-ln", "admin_init": "log"}, "post-ln, which has no omega to set"),
        ({"more_layers": 2, "more_scheme": "t-fixup"}, "T-Fixup was given for an encoder alone"),
        ({"admin_scheme": "dt-fixup"}, "--admin-scheme dt-fixup is only for new layers"),
        ({"encoder_embed_dim": 16}, "embed_tokens.weight of the checkpoint is 49 x 32 and the model's 49 x 16"),
        ({"max_positions": 32}, "embed_positions.weight of the checkpoint is 66 x 32 and the model's 34 x 32"),
        ({"encoder_layers": 2}, "the checkpoint's encoder has 3 layers"),
        ({"admin_scheme": "deepnorm"}, "the checkpoint is of --admin-scheme post-ln"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message, task):
    with pytest.raises(AdminError, match=re.escape(message)):
        loaded(task, **options)


def test_checkpoints_that_do_not_fit_are_refused(task):
    model = loaded(task, more_layers=2, more_scheme="pre-ln")
    for options in ({}, {"more_layers": 3, "more_scheme": "pre-ln"}, {"more_layers": 2, "more_scheme": "post-ln"}):
        with pytest.raises(AdminError, match="the checkpoint has 2 new layers of --more-scheme pre-ln"):
            build(task, **options).load_state_dict(model.state_dict())


def test_missing_parts_are_named(task, data, tmp_path):
    """A missing head, pre-trained encoder, text to measure on, or optimizer with two learning rates is an error."""
    with pytest.raises(AdminError, match="which has no classification head. Give --task sentence_prediction"):
        build(SimpleNamespace(source_dictionary=task.source_dictionary, max_positions=lambda: 64))
    model = build(task, more_layers=1, more_scheme="dt-fixup")
    for message in ("has no pre-trained encoder", "--pretrained-lr-factor 0.008 was given, and the optimizer has"):
        with pytest.raises(AdminError, match=message):
            model(some_words(), classification_head_name=HEAD)
        model.load_state_dict(pretrained(task))
    shutil.copytree(data, tmp_path / "bin", ignore=shutil.ignore_patterns("train*"))
    for empty, options, message in (
        (new_layers.task(tmp_path / "bin"), {}, "which is missing"),
        (new_layers.task(data, max_positions=2), {"max_positions": 2}, "has no sentence within"),
    ):
        model = build(empty, more_layers=1, more_scheme="dt-fixup", **options)
        rows = {key: tensor.size(0) for key, tensor in model.state_dict().items() if "positions" in key}
        state = {key: x[: rows.get(key, len(x))] if x.dim() else x for key, x in pretrained(task).items()}
        with pytest.raises(AdminError, match=message):
            model.load_state_dict(state)
