"""The profiling pass: right numbers in every kind of model, the cost of one forward, and no side effects."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest
import reference
import torch
from kinds import KINDS, logits, omegas
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
def test_omega_is_that_of_the_layers_written_out(kind, rule, padded, options):
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
    logits(model, kind.batch(seed=9))
    assert omegas(model) == first


@pytest.mark.parametrize(
    ("source", "target", "tokens", "sentences"),
    [(11, 9, 1, 1), (11, 9, 21, 1), (11, 9, 22, 2), (11, 9, 87, 7), (11, 9, 8192, 8), (5, 20, 60, 3)],
)
def test_the_first_sentences_within_the_budget_are_profiled(source, target, tokens, sentences):
    """The first `tokens // longest` sentences of both sides: at least one, at most all."""
    src, lengths, prev = reference.batch(source=source, target=target)
    model = tiny(admin_profile_tokens=tokens)
    model(src, lengths, prev)
    record = provenance.decode(model.state_dict()[provenance.KEY])
    counts = [words[:sentences].ne(PAD).sum().item() for words in (src, prev)]
    assert [record["source_tokens"], record["target_tokens"]] == counts


@pytest.mark.parametrize(
    ("message", "fits", "sizes"),
    [
        ("CUDA out of memory. Tried to allocate 1 GiB", 2, [8, 4, 2]),
        ("CUDA out of memory. Tried to allocate 1 GiB", 0, [8, 4, 2, 1]),
        ("shapes do not fit", 0, [8]),
    ],
)
def test_out_of_memory_halves_the_budget(message, fits, sizes, monkeypatch, caplog):
    """Profiling halves the budget down to one sentence, with a warning each time. Other errors are raised at once."""
    tried, measure = [], profiling.measure

    def scarce(model, words, rule):
        tried.append(len(words["encoder"]))
        if tried[-1] > fits:
            raise RuntimeError(message)
        return measure(model, words, rule)

    monkeypatch.setattr(profiling, "measure", scarce)
    model, (src, lengths, prev) = tiny(), reference.batch()
    with nullcontext() if fits else pytest.raises(RuntimeError, match=message), caplog.at_level(logging.WARNING):
        model(src, lengths, prev)
    assert tried == sizes and [record.args for record in caplog.records] == [(size,) for size in sizes[1:]]
    if fits:
        record = provenance.decode(model.state_dict()[provenance.KEY])
        assert record["source_tokens"] == src[:fits].ne(PAD).sum().item()


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


# Rule `paper` subtracts a branch from a sum that includes it, so that branch's own omega is NaN too.
@pytest.mark.parametrize(("rule", "number"), [("reference", 3), ("paper", 2)])
def test_nan_is_named_with_its_sublayer(rule, number):
    """A NaN weight is refused. The message names the stack and the next sub-layer."""
    model = tiny()
    with torch.no_grad():
        model.decoder.layers[0].encoder_attn.out_proj.bias[3] = torch.nan
    with pytest.raises(AdminError, match=f"measured nan for omega at sub-layer {number} of the decoder"):
        profiling.profile(model, TRANSLATION.batch(), rule, 8192)
