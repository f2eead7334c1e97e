"""New layers on a pre-trained encoder: measured and scaled as plain float64 says, stock without them, and refusals."""

from __future__ import annotations

import copy
import math
import pickle
import re
from types import SimpleNamespace

import deeper
import pytest
import reference
import torch
from deeper import HEAD, build, pretrained
from masked import batch
from test_schemes import MECHANISMS

from fairseq_admin.errors import AdminError
from fairseq_admin.fast.attention import FastAttention
from fairseq_admin.fast.stacks import FastEncoder
from fairseq_admin.method import provenance
from fairseq_admin.method.schemes import FOR_EXTRA_LAYERS
from fairseq_admin.radam import FairseqRAdam
from fairseq_admin.rates import AdamByGroup

NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "pooler_dropout": 0.0}
SCALED = ("self_attn.v_proj.weight", "self_attn.out_proj.weight", "fc1.weight", "fc2.weight")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return deeper.binarised(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def task(data):
    return deeper.task(data)


def sentences(task, data, count=None):
    """The training set's sentences, one by one. Each of shape (1, T)."""
    task = deeper.task(data)
    found = task.load_dataset("train")
    return [found[i]["net_input.src_tokens"][None] for i in found.ordered_indices()[:count]]


def features(model, words):
    """The encoder's output without dropout, float64. Shape (1, T, C)."""
    encoder = model.encoder.double().eval()
    with torch.no_grad():
        return encoder(words, features_only=True)[0]


# The measured pass ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 30])
def test_mu_and_every_weight(count, task, data, caplog):
    """Against the plain formula, in float64, sentence by sentence: the largest norm of all, not of any one batch."""
    model = build(task, more_layers=3, more_scheme="dt-fixup", profile_sentences=count, admin_profile_tokens=100)
    drawn = {key: it.double().clone() for key, it in model.more.state_dict().items()}
    state = pretrained(task)
    before = torch.get_rng_state()
    with caplog.at_level("INFO"):
        model.load_state_dict(state)
    assert f"(mu) on {count or 120} sentences in evaluation mode" in caplog.text
    assert model.training and torch.equal(torch.get_rng_state(), before)
    scaled = {key: it.double().clone() for key, it in model.more.state_dict().items()}
    given = sentences(task, data, count or None)
    largest = [features(model, words).square().sum(-1).sqrt().max().item() for words in given]
    mu = max(largest)
    record = provenance.decode(model.more.admin_provenance)
    assert record["scheme"] == "dt-fixup" and record["sentences"] == len(given) == (count or 120)
    assert record["mu"] == pytest.approx(mu, rel=1e-6)  # the encoder ran in float32
    divisor = math.sqrt(3 * (4 * mu * mu + 2 * mu + 2))
    for key, it in drawn.items():
        if key != provenance.KEY:
            expected = it / divisor if key.endswith(SCALED) else it
            torch.testing.assert_close(scaled[key], expected, rtol=1e-6, atol=0, msg=key)


def test_no_norms(task):
    model = reference.scattered(build(task, more_layers=2, more_scheme="dt-fixup")).double().eval()
    words = batch(4, 9)
    words[words >= len(task.source_dictionary)] = 5
    x = torch.randn(4, 9, 32, dtype=torch.float64).masked_fill(words.eq(1)[:, :, None], 0).transpose(0, 1)
    found = model.more.extend(words, x.transpose(0, 1))
    for layer in model.more.layers:
        x = x + layer.self_attn(x, x, x, key_padding_mask=words.eq(1), need_weights=False)[0]
        x = x + layer.fc2(torch.nn.functional.gelu(layer.fc1(x)))
    real = words.ne(1)
    torch.testing.assert_close(found[real], x.transpose(0, 1)[real], rtol=1e-6, atol=1e-6)  # gelu is float32 inside


def test_omega_is_measured_on_the_encoders_output(task, data):
    """As many of the first sentences as there are tokens for, to the last one."""
    used = sentences(task, data, 8)
    budget = len(used) * max(words.size(1) for words in used)
    model = build(task, more_layers=2, more_scheme="admin", admin_profile_tokens=budget)
    model.load_state_dict(pretrained(task))
    norms = [getattr(it, f"{name}_layer_norm") for it in model.more.layers for name in ("self_attn", "final")]
    found = [norm.omega_init[0].item() for norm in norms]
    record = provenance.decode(model.more.admin_provenance)
    assert record["rule"] == "reference" and record["sentences"] == len(used)
    states = [features(model, words)[0] for words in used]
    more, omega, expected = model.more.double(), 1.0, []

    def add(branches, norm):
        """ω_1 = 1, ω_{i+1}² = Var[ω_i x] + Var[f_i]"""
        nonlocal omega, states
        expected.append(omega)
        f, x = torch.cat(branches), torch.cat(states)
        following = math.sqrt(omega**2 * x.var(unbiased=False) + f.var(unbiased=False))
        states = [reference.normalised(x * omega + f, norm) for x, f in zip(states, branches)]
        omega = following

    with torch.no_grad():
        for layer in more.layers:
            add(
                [layer.self_attn(x[:, None], x[:, None], x[:, None])[0][:, 0] for x in states],
                layer.self_attn_layer_norm,
            )
            add([layer.fc2(torch.nn.functional.gelu(layer.fc1(x))) for x in states], layer.final_layer_norm)
    assert found == pytest.approx(expected, rel=1e-5) and found[0] == 1 and found[3] > found[1]


@pytest.mark.parametrize("scheme", [*MECHANISMS, *FOR_EXTRA_LAYERS])
def test_every_scheme_trains_and_loads_back(scheme, task):
    model = build(task, more_layers=2, more_scheme=scheme, pretrained_lr_factor=0)
    names = model.state_dict().keys()
    model.load_state_dict(pretrained(task))
    assert model.state_dict().keys() == names  # fairseq drops the norm that ends a stack of version 1
    words = torch.randint(4, 44, (4, 9), generator=torch.Generator().manual_seed(1))
    first = model(words, classification_head_name=HEAD)[0]
    first.square().mean().backward()
    grads = [p.grad for p in model.more.parameters() if p.grad is not None]
    assert grads and any(grad.abs().max() > 0 for grad in grads)
    with torch.no_grad():
        for p in model.more.parameters():
            p.sub_(0 if p.grad is None else 0.1 * p.grad)
    other = build(task, seed=2, more_layers=2, more_scheme=scheme)
    other.load_state_dict(model.state_dict())
    model.eval(), other.eval()
    outputs = [it(words, classification_head_name=HEAD)[0] for it in (model, other)]
    assert torch.equal(*outputs) and outputs[0].isfinite().all()


@pytest.mark.parametrize("scheme", ["admin", "pre-ln"])
def test_pickled(scheme, task):
    """It computes the same, and has no training set to measure another encoder on."""
    model = build(task, more_layers=2, more_scheme=scheme, admin_fast="on")
    model.load_state_dict(pretrained(task))
    words = torch.randint(4, 44, (4, 9), generator=torch.Generator().manual_seed(1))
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        other.load_state_dict(model.state_dict())
        outputs = [it.eval()(words, classification_head_name=HEAD)[0] for it in (model, other)]
        assert torch.equal(*outputs)
        if other.more.measured:
            with pytest.raises(AdminError, match="the model is a copy, without the training set"):
                other.load_state_dict(pretrained(task))


@pytest.mark.parametrize("scheme", ["admin", "dt-fixup", "pre-ln", "residual"])
def test_fast_new_layers(scheme, task):
    """The same measurement, and in training the same output and gradients but for float32, as with plain ones."""
    words = torch.randint(4, 44, (6, 9), generator=torch.Generator().manual_seed(1))
    words[2, 5:] = words[4, 3:] = 1
    outputs, gradients, records = [], [], []
    for fast in ("off", "on"):
        model = build(task, more_layers=3, more_scheme=scheme, pretrained_lr_factor=1, admin_fast=fast, **NO_DROPOUT)
        model.load_state_dict(pretrained(task))
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


@pytest.mark.parametrize("given", [{}, {"encoder_layerdrop": 0.5}])
def test_no_more_layers_is_stock(given, task):
    """The same training forward and gradients as fairseq's RoBERTa, bit for bit."""
    models = [build(task, arch, pretrained_lr_factor=1, **given) for arch in ("deeper_admin", "roberta")]
    words = torch.randint(4, 44, (6, 9), generator=torch.Generator().manual_seed(1))
    outputs = []
    for model in models:
        model.load_state_dict(pretrained(task))
        model.classification_heads.load_state_dict(models[0].classification_heads.state_dict())
        torch.manual_seed(3)
        outputs.append(model(words, classification_head_name=HEAD)[0])
        outputs[-1].square().mean().backward()
    assert torch.equal(*outputs)
    pairs = list(zip(*(model.parameters() for model in models)))
    assert models[0].state_dict().keys() == models[1].state_dict().keys()
    assert all(
        (a.grad is None) == (b.grad is None) and (a.grad is None or torch.equal(a.grad, b.grad)) for a, b in pairs
    )
    assert any(a.grad is not None and a.grad.abs().max() > 0 for a, _ in pairs)


@pytest.mark.parametrize("given", [{"admin_fast": "on"}, {"checkpoint_activations": True}])
def test_a_frozen_encoder_costs_one_forward(given, task):
    """In training mode too its features are those of evaluation mode, and no tensor is kept for a backward."""
    words = torch.randint(4, 44, (4, 9), generator=torch.Generator().manual_seed(1))
    found, kept = [], []
    for factor in (0, 1):
        model = build(task, pretrained_lr_factor=factor, **given)
        model.load_state_dict(pretrained(task))
        kept.append([])
        with torch.autograd.graph.saved_tensors_hooks(lambda it: kept[-1].append(it) or it, lambda it: it):
            found.append(model(words)[0])
    assert not kept[0] and kept[1] and not found[0].requires_grad
    assert torch.equal(found[0], model.eval()(words)[0]) and not torch.equal(*found)


def test_new_layers_learn_on_a_frozen_encoder_whatever_is_kept(task):
    """Have their weights the same gradients with --checkpoint-activations, which asks for an input that has one?"""
    words = torch.randint(4, 44, (4, 9), generator=torch.Generator().manual_seed(1))
    gradients = []
    for checkpointed in (False, True):
        given = {"checkpoint_activations": checkpointed, "pretrained_lr_factor": 0, **NO_DROPOUT}
        model = build(task, more_layers=2, more_scheme="pre-ln", **given)
        model.load_state_dict(pretrained(task))
        model(words, classification_head_name=HEAD)[0].square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 30
    assert all(torch.equal(it, gradients[1][name]) for name, it in gradients[0].items())


@pytest.mark.parametrize("handle", [FairseqRAdam, AdamByGroup])
def test_the_encoder_learns_at_its_share(handle, task):
    """Ten updates on the same gradients: what the encoder moves by is 0.008 of what it moves by at the full rate."""
    moved = []
    for factor in (1, 0.008):
        model = build(task, more_layers=2, more_scheme="pre-ln", pretrained_lr_factor=factor)
        config = SimpleNamespace(
            adam_betas="(0.9, 0.98)", adam_eps=1e-8, weight_decay=0.0, lr=[1e-3], fp16_adam_stats=False
        )
        optimizer = handle(config, list(model.parameters()))
        optimizer.set_lr(1e-3)
        assert optimizer.get_lr() == 1e-3
        parameters = dict(model.named_parameters())
        watched = {
            key: parameters[key] for key in ("encoder.sentence_encoder.layers.0.fc1.bias", "more.layers.0.fc1.bias")
        }
        start = {key: p.detach().clone() for key, p in watched.items()}
        for number in range(10):
            generator = torch.Generator().manual_seed(number)
            for p in watched.values():
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        moved.append([p.detach() - start[key] for key, p in watched.items()])
        assert model.slower is None or model.slower.taken
    (encoder, more), (slow_encoder, same_more) = moved
    assert torch.equal(more, same_more) and encoder.abs().min() > 1e-6
    torch.testing.assert_close(slow_encoder, 0.008 * encoder, rtol=1e-2, atol=1e-8)  # a float32 bias of about 0.1


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, said",
    [
        ({"more_scheme": "dt-fixup"}, "--more-layers is 0 and --more-scheme dt-fixup; expected both or neither"),
        ({"more_layers": 2}, "--more-layers is 2 and --more-scheme None; expected both or neither"),
        ({"more_layers": 2, "more_scheme": "t-fixup"}, "its paper scales the embeddings too"),
        ({"admin_scheme": "dt-fixup"}, "--admin-scheme dt-fixup was given, which is for new layers"),
    ],
)
def test_unsuitable_options(given, said, task):
    with pytest.raises(AdminError, match="^" + re.escape(said) if said[0] == "-" else re.escape(said)):
        build(task, **given)


def test_a_task_without_a_head(task):
    other = SimpleNamespace(source_dictionary=task.source_dictionary, max_positions=lambda: 64)
    with pytest.raises(AdminError, match="which has no classification head. Give --task sentence_prediction"):
        build(other)


def test_other_encoders(task):
    state = pretrained(task)
    for given, said in (
        ({"encoder_embed_dim": 16}, "embed_tokens.weight of the checkpoint is 49 x 32 and the model's 49 x 16"),
        ({"max_positions": 32}, "embed_positions.weight of the checkpoint is 66 x 32 and the model's 34 x 32"),
        ({"encoder_layers": 2}, "the checkpoint's encoder has 3 layers"),
        ({"admin_scheme": "deepnorm"}, "the checkpoint is of --admin-scheme post-ln"),
    ):
        with pytest.raises(AdminError, match=re.escape(said)):
            build(task, **given).load_state_dict(dict(state))
    words = {key: it[:44] if it.dim() and len(it) == 49 else it for key, it in state.items()}
    with pytest.raises(AdminError, match="embed_tokens.weight of the checkpoint is 44 x 32 and the model's 49 x 32"):
        build(task).load_state_dict(words)


def test_other_new_layers(task):
    model = build(task, more_layers=2, more_scheme="pre-ln")
    model.load_state_dict(pretrained(task))
    for given in ({}, {"more_layers": 3, "more_scheme": "pre-ln"}, {"more_layers": 2, "more_scheme": "post-ln"}):
        with pytest.raises(AdminError, match="the checkpoint has 2 new layers of --more-scheme pre-ln"):
            build(task, **given).load_state_dict(model.state_dict())


def test_no_pretrained_encoder_and_no_optimizer_for_it(task):
    words = torch.randint(4, 44, (4, 9), generator=torch.Generator().manual_seed(1))
    model = build(task, more_layers=1, more_scheme="dt-fixup")
    with pytest.raises(AdminError, match="has no pre-trained encoder"):
        model(words, classification_head_name=HEAD)
    model.load_state_dict(pretrained(task))
    with pytest.raises(AdminError, match="--pretrained-lr-factor 0.008 was given, and the optimizer has one rate"):
        model(words, classification_head_name=HEAD)


def test_nothing_to_measure_on(task, data, tmp_path):
    for path in data.rglob("*"):
        if path.is_file() and not path.name.startswith("train"):
            copy = tmp_path / path.relative_to(data)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    for empty, given, said in (
        (deeper.task(tmp_path), {}, "there is none"),
        (deeper.task(data, max_positions=2), {"max_positions": 2}, "are all longer"),
    ):
        model = build(empty, more_layers=1, more_scheme="dt-fixup", **given)
        state = {
            k: it[: model.state_dict()[k].size(0)] if "positions" in k else it for k, it in pretrained(task).items()
        }
        with pytest.raises(AdminError, match=said):
            model.load_state_dict(state)
