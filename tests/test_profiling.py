"""The measured pass: the right numbers, at the cost of one forward, and nothing left behind."""

from __future__ import annotations

import copy
import logging
import math
from types import SimpleNamespace

import pytest
import reference
import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.modules import LayerDropModuleList
from torch import nn

from fairseq_admin.method import profiling, provenance
from fairseq_admin.method.norms import shortcut_norms
from fairseq_admin.monitor.monitor import first_rank

DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1}


def tiny(seed=1, **options):
    sizes = {**reference.TINY, "encoder_layers": 3, "decoder_layers": 3}
    return reference.build("transformer_admin", seed=seed, **{**sizes, **DROPOUT, **options})


def omega_of(model):
    return [norm.omega[0].item() for stack in (model.encoder, model.decoder) for norm in shortcut_norms(stack)]


@pytest.mark.parametrize("rule", ["reference", "paper"])
@pytest.mark.parametrize("padded", [True, False])
def test_against_the_layers_written_out(rule, padded):
    model, (src, _, prev) = tiny(), reference.batch(padded=padded)
    torch.manual_seed(3)
    measured = profiling.measure(model, src, prev, rule)
    torch.manual_seed(3)
    encoder, decoder = reference.profile_by_hand(model, src, prev, rule)
    assert len(encoder) == 6 and len(decoder) == 9 and max(decoder) > 1.2
    # float32 activations of a dozen sub-layers, each off by a few roundings of 6e-8.
    assert measured.tolist() == pytest.approx(encoder + decoder, rel=2e-6)


@pytest.mark.parametrize("rule", ["reference", "paper"])
def test_against_the_layers_written_out_in_float64(rule):
    model, (src, _, prev) = tiny(dropout=0.0, attention_dropout=0.0, activation_dropout=0.0), reference.batch()
    measured = profiling.measure(model, src, prev, rule)
    encoder, decoder = reference.profile_by_hand(copy.deepcopy(model).double(), src, prev, rule)
    # The model under test works in float32.
    assert measured.tolist() == pytest.approx(encoder + decoder, rel=2e-6)


def test_rules_differ_and_padding_matters():
    """Otherwise the comparisons above would prove little."""
    model, (src, _, prev) = tiny(), reference.batch()
    results = []
    for rule, counted in (("reference", False), ("paper", False), ("reference", True)):
        torch.manual_seed(3)
        encoder, decoder = reference.profile_by_hand(model, src, prev, rule, padding_counted=counted)
        results.append(encoder + decoder)
    for a, b in ((0, 1), (0, 2)):
        assert max(abs(x / y - 1) for x, y in zip(results[a], results[b])) > 0.005


def test_padding_columns_change_nothing():
    """The same sentences in a batch that is padded further give the same ω (no dropout: its draws would differ)."""
    model, (src, _, prev) = tiny(dropout=0.0, attention_dropout=0.0, activation_dropout=0.0), reference.batch()
    before = profiling.measure(model, src, prev, "reference")
    wide = torch.full((len(src), 5), reference.PAD)
    after = profiling.measure(model, torch.cat([wide, src], 1), torch.cat([prev, wide], 1), "reference")
    assert torch.allclose(before, after, rtol=2e-6)


def test_the_first_training_forward_profiles_and_no_other():
    model, batch = tiny(), reference.batch()
    model.eval()
    model(*batch)
    assert set(omega_of(model)) == {1.0} and not model.profiled
    model.train()
    torch.manual_seed(3)
    model(*batch)
    first = omega_of(model)
    twin = tiny()
    torch.manual_seed(3)
    expected = profiling.measure(twin, batch[0], batch[2], "reference")
    assert first == expected.tolist()
    model(*reference.batch(seed=9))
    assert omega_of(model) == first
    record = provenance.decode(model.state_dict()[provenance.KEY])
    src, _, prev = batch
    assert record["rule"] == "reference" and record["seed"] == 3
    assert (record["source_tokens"], record["target_tokens"]) == (
        src.ne(reference.PAD).sum().item(),
        prev.ne(reference.PAD).sum().item(),
    )


def test_first_sublayers_stay_at_1():
    model = tiny()
    model(*reference.batch())
    assert shortcut_norms(model.encoder)[0].omega.eq(1).all() and shortcut_norms(model.decoder)[0].omega.eq(1).all()


@pytest.mark.parametrize("rule, sublayers, omega", [("log", 6, 1.6116105), ("constant", 9, 3.0)])
def test_rules_by_depth_need_no_batch(rule, sublayers, omega):
    # log, S = 6: 7 / ln 7 = 7 / 1.9459101 = 3.5972884, less 1 = 2.5972884, root = 1.6116105.
    model = tiny(admin_init=rule)
    assert model.profiled
    stack = model.encoder if sublayers == 6 else model.decoder
    assert [n.omega.unique().tolist() for n in shortcut_norms(stack)] == [[pytest.approx(omega, abs=1e-6)]] * sublayers


def test_leaves_everything_as_it_was():
    options = {
        "encoder_layerdrop": 0.3,
        "decoder_layerdrop": 0.3,
        "quant_noise_pq": 0.5,
        "quant_noise_pq_block_size": 8,
    }
    model, (src, _, prev) = tiny(**options), reference.batch()
    model.encoder.layers[1].eval()  # a module keeps its mode, whatever it is
    for number, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, number)
    weights = {name: tensor.clone() for name, tensor in model.named_parameters()}
    modes = [module.training for module in model.modules()]
    grads_enabled, state = torch.is_grad_enabled(), torch.get_rng_state()
    profiling.profile(model, src, prev, "reference", 8192)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert any(modes) and not all(modes)
    assert torch.is_grad_enabled() == grads_enabled
    for number, (name, p) in enumerate(model.named_parameters()):
        assert torch.equal(p, weights[name]), name
        assert torch.equal(p.grad, torch.full_like(p, number)) and p.requires_grad, name
    assert not any("residual_connection" in vars(module) for module in model.modules())


def test_layerdrop_does_not_drop_while_profiling():
    model, plain, (src, _, prev) = tiny(encoder_layerdrop=0.9, decoder_layerdrop=0.9), tiny(), reference.batch()
    model.load_state_dict(plain.state_dict())
    assert isinstance(model.encoder.layers, LayerDropModuleList)
    state = torch.get_rng_state()
    measured = profiling.measure(model, src, prev, "reference")
    # Layerdrop draws a number per layer, so dropout's masks differ from those without it: two draws agree to about 2 %.
    torch.set_rng_state(state)
    assert torch.allclose(measured, profiling.measure(plain, src, prev, "reference"), rtol=0.05)


def test_failure_leaves_modes_and_hooks_as_they_were(monkeypatch):
    model, (src, _, prev) = tiny(encoder_layerdrop=0.3), reference.batch()
    monkeypatch.setattr(model.decoder.layers[1], "forward", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        profiling.measure(model, src, prev, "reference")
    assert all(module.training for module in model.modules())
    assert not any("residual_connection" in vars(module) for module in model.modules())


def test_forward_after_profiling_under_autocast_reaches_every_weight(monkeypatch):
    """torch 2.13 itself keeps apart what it cast without gradients; older versions hand it to the training forward."""
    model, batch = tiny(), reference.batch()
    cleared = []
    clear = torch.clear_autocast_cache
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: cleared.append(model.training) or clear())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(*batch)[0].float().square().mean()
        assert cleared == [True]  # before autocast clears it on its way out
    loss.backward()
    assert model.profiled
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    # A key's bias adds the same to every logit of a query, so its gradient is zero up to rounding.
    assert [name for name in missing if not name.endswith("k_proj.bias")] == []


def test_autocast_measures_as_float32_does():
    src, _, prev = reference.batch()
    quiet = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    plain = profiling.measure(tiny(**quiet), src, prev, "reference")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = profiling.measure(tiny(**quiet), src, prev, "reference")
    assert cast.dtype == torch.float32
    # bfloat16 has 8 significant bits, 0.4 % an operation; a variance averages over thousands of them.
    assert torch.allclose(cast, plain, rtol=5e-3)


@pytest.mark.parametrize(
    "tokens, sentences",
    [(1, 1), (10, 1), (11, 1), (21, 1), (22, 2), (87, 7), (88, 8), (8192, 8)],
)
def test_token_budget(tokens, sentences, monkeypatch):
    """The first tokens // longest sentences, at least one, at most all. Sources here are the longer side: 11 tokens."""
    used = []
    measure = profiling.measure
    monkeypatch.setattr(
        profiling, "measure", lambda m, src, prev, rule: used.append((src, prev)) or measure(m, src, prev, rule)
    )
    src, lengths, prev = reference.batch()
    model = tiny(admin_profile_tokens=tokens)
    model(src, lengths, prev)
    assert len(used) == 1
    assert torch.equal(used[0][0], src[:sentences]) and torch.equal(used[0][1], prev[:sentences])
    record = provenance.decode(model.state_dict()[provenance.KEY])
    assert record["source_tokens"] == src[:sentences].ne(reference.PAD).sum().item()


def test_token_budget_counts_the_longer_side():
    src, _, prev = reference.batch(source=5, target=20)
    record = profiling.profile(tiny(), src, prev, "reference", 60)
    assert record["target_tokens"] == prev[:3].ne(reference.PAD).sum().item()


def test_out_of_memory_halves_the_budget(monkeypatch, caplog):
    sizes = []
    measure = profiling.measure

    def scarce(model, src, prev, rule):
        sizes.append(len(src))
        if len(src) > 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return measure(model, src, prev, rule)

    monkeypatch.setattr(profiling, "measure", scarce)
    model, (src, lengths, prev) = tiny(), reference.batch()
    with caplog.at_level(logging.WARNING):
        model(src, lengths, prev)
    assert sizes == [8, 4, 2]
    assert (
        provenance.decode(model.state_dict()[provenance.KEY])["source_tokens"] == src[:2].ne(reference.PAD).sum().item()
    )
    assert [r.args for r in caplog.records] == [(4,), (2,)]


def test_out_of_memory_on_one_sentence_is_raised(monkeypatch):
    monkeypatch.setattr(profiling, "measure", lambda *_: (_ for _ in ()).throw(RuntimeError("CUDA out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        tiny()(*reference.batch())


def test_other_errors_are_not_retried(monkeypatch):
    calls = []

    def broken(*_):
        calls.append(1)
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(profiling, "measure", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        tiny()(*reference.batch())
    assert calls == [1]


@pytest.mark.parametrize("rank", [0, 3])
def test_the_cores_of_a_tpu_have_the_first_ones_omega(rank, monkeypatch):
    """fairseq uses no torch.distributed there, and torch_xla's collectives."""
    cores = SimpleNamespace(xrt_world_size=lambda: 8, get_ordinal=lambda: rank)
    monkeypatch.setattr(distributed_utils, "_USE_XLA", True)
    monkeypatch.setattr(distributed_utils, "xm", cores, raising=False)
    sent = []
    monkeypatch.setattr(distributed_utils, "broadcast", lambda tensor, src, group: sent.append((tensor, src, group)))
    omega = torch.ones(3)
    assert profiling.from_first_rank(omega) is omega
    assert [(tensor is omega, src, group) for tensor, src, group in sent] == [(True, 0, ("tpu", [[*range(8)]]))]
    assert first_rank() == (rank == 0)


def test_costs_one_forward_of_every_layer_and_no_output_projection():
    model, batch = tiny(), reference.batch()
    calls = dict.fromkeys(range(6), 0)

    def count(number):
        def hook(*_):
            calls[number] += 1

        return hook

    for number, layer in enumerate([*model.encoder.layers, *model.decoder.layers]):
        layer.register_forward_hook(count(number))
    projections = []
    model.decoder.output_projection.register_forward_hook(lambda *_: projections.append(1))
    model(*batch)
    assert list(calls.values()) == [2] * 6 and len(projections) == 1  # the pass, and the training forward
    model(*batch)
    assert list(calls.values()) == [3] * 6 and len(projections) == 2


def test_activation_checkpointing_measures_the_same_and_trains_the_same():
    results = []
    for option in (False, True):
        model, batch = tiny(checkpoint_activations=option), reference.batch()
        torch.manual_seed(3)
        model(*batch)[0].square().mean().backward()
        results.append((omega_of(model), [p.grad for p in model.parameters()]))
    (plain, plain_grads), (saving, saving_grads) = results
    assert plain == saving and max(plain) > 1.2
    for a, b in zip(plain_grads, saving_grads):
        # Recomputed activations are the same bits; their gradients are summed in another order.
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-7)


def test_deep_copies_profile_for_themselves_and_keep_what_they_have():
    model, batch = tiny(), reference.batch()
    early = copy.deepcopy(model)
    model(*batch)
    late = copy.deepcopy(model)
    assert late.profiled and omega_of(late) == omega_of(model)
    assert torch.equal(late.state_dict()[provenance.KEY], model.state_dict()[provenance.KEY])
    assert not early.profiled and set(omega_of(early)) == {1.0}
    torch.manual_seed(3)
    early(*batch)
    assert early.profiled and omega_of(model) == omega_of(late)
    for norm in shortcut_norms(late.encoder):
        norm.set_omega(9.0)
    assert max(omega_of(model)) < 9.0


def test_an_observer_sees_shortcut_branch_and_output():
    """What the analysis tools will build on: a forward hook on a norm."""
    model, batch, seen = tiny(), reference.batch(), []
    model(*batch)
    for norm in shortcut_norms(model.encoder):
        norm.register_forward_hook(lambda norm, inputs, output: seen.append((norm, *inputs[0], output)))
    model(*batch)
    assert len(seen) == 6
    for norm, branch, shortcut, output in seen:
        assert torch.equal(
            output, nn.functional.layer_norm(shortcut * norm.omega + branch, (64,), norm.weight, norm.bias)
        )


@pytest.mark.slow
def test_feed_forward_variance_at_base_width_is_the_published_one():
    """The increments of ω² at d=512, FFN 2048, all dropout 0.1, freshly initialised, against the published profile.

    By hand: an input of variance 1 meets fc1, Var = 512 · 2/2560 = 0.4; ReLU leaves the second moment 0.2, dropout
    makes it 0.2 / 0.9; fc2 gives 2048 · (2/2560) · 0.2222 = 0.3556, and the last dropout 0.3556 / 0.9 = 0.3951.
    """
    sizes = {"encoder_layers": 6, "decoder_layers": 12, **DROPOUT}
    model = reference.build("transformer_admin", words=1000, **sizes)
    src, _, prev = reference.batch(sentences=16, source=24, target=24, words=1000)
    omega = profiling.measure(model, src, prev, "reference").double()
    encoder, decoder = omega.split([12, 36])
    increments = {
        "encoder": encoder[2::2].square() - encoder[1:-1:2].square(),
        "decoder": decoder[3::3].square() - decoder[2:-1:3].square(),
    }
    for name, found in increments.items():
        published = {"encoder": 0.395, "decoder": 0.397}[name]
        # Weights are drawn: 5 and 11 layers' means scatter by about 1 %. The published means are of one draw too.
        assert found.mean().item() == pytest.approx(published, rel=0.03), name
        assert math.isclose(found.min().item(), found.max().item(), rel_tol=0.15), name
