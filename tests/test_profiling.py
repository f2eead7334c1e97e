"""The profiling pass: right numbers in every kind of model, the cost of one forward, and no side effects."""

from __future__ import annotations

import logging
import math

import pytest
import reference
import torch
from kinds import KINDS, STILL, logits, omegas
from reference import PAD

import fairseq_admin
from fairseq_admin.errors import AdminError
from fairseq_admin.method import profiling, provenance
from fairseq_admin.method.norms import shortcut_norms
from fairseq_admin.method.schemes import stacks_of

DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1}
TRANSLATION = KINDS["translation"]
KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def tiny(**options):
    return TRANSLATION.build(**{**DROPOUT, **options})


# The numbers ---------------------------------------------------------------------------------------------------------


@KIND
@pytest.mark.parametrize("rule", ["reference", "paper"])
@pytest.mark.parametrize(
    ("padded", "options"),
    [(True, DROPOUT), (False, DROPOUT), (True, {**DROPOUT, "encoder_layerdrop": 0.9, "decoder_layerdrop": 0.9})],
    ids=["padded", "full", "layerdrop"],
)
def test_against_the_layers_written_out(kind, rule, padded, options):
    """Profiling matches the layers written out, and drops no layer."""
    model, words = kind.build(**options), kind.batch(padded=padded)
    torch.manual_seed(3)
    measured = profiling.measure(model, words, rule)
    torch.manual_seed(3)
    expected = sum(reference.profile_by_hand(model, words.get("encoder"), words.get("decoder"), rule), [])
    assert len(expected) == sum(len(shortcut_norms(stack)) for stack in stacks_of(model).values())
    assert max(expected) > 1.2
    # Activations of a dozen sub-layers are float32: each is off by a few roundings of 6e-8.
    assert measured.tolist() == pytest.approx(expected, rel=2e-6)


@KIND
@pytest.mark.parametrize("rule", ["log", "constant"])
def test_rules_by_depth_need_no_batch(kind, rule):
    # log, S = 6 in every stack: 7 / ln 7 = 7 / 1.9459101 = 3.5972884, less 1 = 2.5972884, root = 1.6116105.
    model = kind.build(admin_init=rule)
    expected = {"log": 1.6116105, "constant": 6**0.5}[rule]
    assert model.profiled and omegas(model) == [pytest.approx(expected, abs=1e-6)] * 6 * len(kind.batch())


def test_autocast_measures_as_float32_does():
    words = TRANSLATION.batch()
    plain = profiling.measure(tiny(**STILL, activation_dropout=0.0), words, "reference")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = profiling.measure(tiny(**STILL, activation_dropout=0.0), words, "reference")
    assert cast.dtype == torch.float32
    # bfloat16 has 8 significant bits, so each operation is off by 0.4 %; a variance averages over thousands of them.
    assert torch.allclose(cast, plain, rtol=5e-3)


# When, and on what ---------------------------------------------------------------------------------------------------


@KIND
def test_the_first_training_forward_profiles_and_no_other(kind):
    model, words = kind.build().eval(), kind.batch()
    logits(model, words)
    assert set(omegas(model)) == {1.0} and not model.profiled
    logits(model.train(), words, seed=3)
    first, again = omegas(model), kind.build()
    torch.manual_seed(3)
    assert first == profiling.measure(again, words, "reference").tolist()
    record = provenance.decode(model.state_dict()[provenance.KEY])
    counts = {side: int(tokens.ne(PAD).sum()) for side, tokens in words.items()}
    names = (
        {"encoder": "source_tokens", "decoder": "target_tokens"}
        if len(counts) == 2
        else dict.fromkeys(counts, "tokens")
    )
    tokens = {names[side]: count for side, count in counts.items()}
    assert record == {"rule": "reference", **tokens, "seed": 3, "version": fairseq_admin.__version__}
    other = kind.build(seed=2)
    other.load_state_dict(model.state_dict())
    for profiled in (model, other):
        logits(profiled, kind.batch(seed=9))
        assert omegas(profiled) == first


@pytest.mark.parametrize(
    ("source", "target", "tokens", "sentences"),
    [(11, 9, 1, 1), (11, 9, 21, 1), (11, 9, 22, 2), (11, 9, 87, 7), (11, 9, 8192, 8), (5, 20, 60, 3)],
)
def test_token_budget(source, target, tokens, sentences, monkeypatch):
    """Profiling uses the first `tokens // longest` sentences of both sides: at least one, at most all."""
    used, measure = [], profiling.measure
    monkeypatch.setattr(profiling, "measure", lambda *arguments: used.append(arguments[1]) or measure(*arguments))
    src, lengths, prev = reference.batch(source=source, target=target)
    model = tiny(admin_profile_tokens=tokens)
    model(src, lengths, prev)
    (words,) = used
    assert torch.equal(words["encoder"], src[:sentences]) and torch.equal(words["decoder"], prev[:sentences])
    record = provenance.decode(model.state_dict()[provenance.KEY])
    assert record["source_tokens"] == src[:sentences].ne(PAD).sum().item()


def test_the_log_of_one_stack(caplog):
    model, words = KINDS["language"].build(admin_profile_tokens=25), KINDS["language"].batch()
    with caplog.at_level("INFO"):
        logits(model, words)  # a sentence has 11 words: two fit
    (line,) = [record.getMessage() for record in caplog.records if "profiled" in record.getMessage()]
    assert line.startswith("Admin: profiled by rule reference on 21 tokens in ")
    assert ": decoder 6 sub-layers, omega 1.000 to " in line


def test_out_of_memory_halves_the_budget(monkeypatch, caplog):
    sizes, measure = [], profiling.measure

    def scarce(model, words, rule):
        sizes.append(len(words["encoder"]))
        if sizes[-1] > 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return measure(model, words, rule)

    monkeypatch.setattr(profiling, "measure", scarce)
    model, (src, lengths, prev) = tiny(), reference.batch()
    with caplog.at_level(logging.WARNING):
        model(src, lengths, prev)
    record = provenance.decode(model.state_dict()[provenance.KEY])
    assert sizes == [8, 4, 2] and record["source_tokens"] == src[:2].ne(PAD).sum().item()
    assert [r.args for r in caplog.records] == [(4,), (2,)]


@pytest.mark.parametrize(("message", "sizes"), [("CUDA out of memory", [8, 4, 2, 1]), ("shapes do not fit", [8])])
def test_an_error_that_no_smaller_batch_cures_is_raised(message, sizes, monkeypatch):
    tried = []

    def broken(model, words, rule):
        tried.append(len(words["encoder"]))
        raise RuntimeError(message)

    monkeypatch.setattr(profiling, "measure", broken)
    with pytest.raises(RuntimeError, match=message):
        tiny()(*reference.batch())
    assert tried == sizes


# Side effects and cost -----------------------------------------------------------------------------------------------


def hooked(model):
    return any("residual_connection" in vars(module) for module in model.modules())


def test_leaves_everything_as_it_was():
    noise = {"quant_noise_pq": 0.5, "quant_noise_pq_block_size": 8}
    model = tiny(encoder_layerdrop=0.3, decoder_layerdrop=0.3, **noise)
    model.encoder.layers[1].eval()  # profiling must keep this mode
    for number, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, number)
    weights = {name: tensor.clone() for name, tensor in model.named_parameters()}
    modes = [module.training for module in model.modules()]
    grads_enabled, state = torch.is_grad_enabled(), torch.get_rng_state()
    profiling.profile(model, TRANSLATION.batch(), "reference", 8192)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert any(modes) and not all(modes)
    assert torch.is_grad_enabled() == grads_enabled
    for number, (name, p) in enumerate(model.named_parameters()):
        assert torch.equal(p, weights[name]), name
        assert torch.equal(p.grad, torch.full_like(p, number)) and p.requires_grad, name
    assert not hooked(model)


def test_failure_leaves_modes_and_hooks_as_they_were(monkeypatch):
    model = tiny(encoder_layerdrop=0.3)
    monkeypatch.setattr(model.decoder.layers[1], "forward", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        profiling.measure(model, TRANSLATION.batch(), "reference")
    assert all(module.training for module in model.modules()) and not hooked(model)


def test_forward_after_profiling_under_autocast_reaches_every_weight(monkeypatch):
    """Profiling clears autocast's cache.

    Casts made while profiling have no gradients, and torch before 2.13 would reuse them in training.
    """
    model, batch = tiny(), reference.batch()
    cleared, clear = [], torch.clear_autocast_cache
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: cleared.append(model.training) or clear())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(*batch)[0].float().square().mean()
        assert cleared == [True]  # autocast itself clears it only on exit
    loss.backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    # A key's bias adds the same value to all logits of a query, so its gradient is zero up to rounding.
    assert [name for name in missing if not name.endswith("k_proj.bias")] == []


def test_costs_one_forward_of_every_layer_and_no_output_projection():
    model, batch, calls = tiny(), reference.batch(), []
    layers = [*model.encoder.layers, *model.decoder.layers]
    for module in (*layers, model.decoder.output_projection):
        module.register_forward_hook(lambda module, *_: calls.append(module))
    model(*batch)
    assert [calls.count(layer) for layer in layers] == [2] * 5  # profiling, then the training forward
    assert calls.count(model.decoder.output_projection) == 1
    calls.clear()
    model(*batch)
    assert len(calls) == 6


# Refusals ------------------------------------------------------------------------------------------------------------


@KIND
@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_a_batch_without_tokens_is_refused(kind, side):
    """A batch of padding alone is refused, on either side."""
    words = dict.fromkeys(kind.batch(), torch.full((2, 5), 7))
    side = side if side in words else next(iter(words))
    words[side] = torch.full((2, 5), PAD)
    with pytest.raises(AdminError, match="the batch is all padding to a stack"):
        logits(kind.build(), words)


@pytest.mark.parametrize("rule", ["reference", "paper"])
def test_nan_at_profiling(rule):
    """A NaN weight is refused. The message names the stack and the next sub-layer."""
    # Rule `paper` subtracts a branch from a sum that includes it, so that branch's own omega is NaN too.
    cases = [
        ("encoder", 2, lambda model: model.encoder.embed_tokens.weight[7]),
        (
            "decoder",
            {"reference": 3, "paper": 2}[rule],
            lambda model: model.decoder.layers[0].encoder_attn.out_proj.bias,
        ),
    ]
    words = dict.fromkeys(("encoder", "decoder"), torch.full((2, 5), 7))
    for side, number, vector in cases:
        model = tiny()
        with torch.no_grad():
            vector(model)[3] = torch.nan
        with pytest.raises(AdminError, match=f"measured nan for omega at sub-layer {number} of the {side}"):
            profiling.profile(model, words, rule, 8192)


# The published numbers -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_feed_forward_variance_at_base_width_is_the_published_one():
    """The increments of ω² match the published profile: d=512, FFN 2048, all dropout 0.1, freshly initialised.

    By hand: the input has variance 1. After fc1, Var = 512 · 2/2560 = 0.4. ReLU halves the second moment to 0.2, and
    dropout makes it 0.2 / 0.9. fc2 gives 2048 · (2/2560) · 0.2222 = 0.3556, and the last dropout 0.3556 / 0.9 = 0.3951.
    """
    sizes = {"encoder_layers": 6, "decoder_layers": 12, **DROPOUT}
    model = reference.build("transformer_admin", words=1000, **sizes)
    src, _, prev = reference.batch(sentences=16, source=24, target=24, words=1000)
    omega = profiling.measure(model, {"encoder": src, "decoder": prev}, "reference").double()
    encoder, decoder = omega.split([12, 36])
    increments = {
        "encoder": encoder[2::2].square() - encoder[1:-1:2].square(),
        "decoder": decoder[3::3].square() - decoder[2:-1:3].square(),
    }
    for name, measured in increments.items():
        published = {"encoder": 0.395, "decoder": 0.397}[name]
        # Weights are random: means over 5 and 11 layers scatter by about 1 %. The published means come from one draw
        # too.
        assert measured.mean().item() == pytest.approx(published, rel=0.03), name
        assert math.isclose(measured.min().item(), measured.max().item(), rel_tol=0.15), name
