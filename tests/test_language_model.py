"""The language model: stock where it should be, each scheme what it says, ω as a plain loop measures it, one line
where it cannot work."""

from __future__ import annotations

import copy
import math
import re
from argparse import Namespace
from functools import partial
from types import SimpleNamespace

import language
import masked
import pytest
import reference
import torch
from language import STILL, batch, build

import fairseq_admin
from fairseq_admin.architectures.divergence import DivergedError
from fairseq_admin.errors import AdminError
from fairseq_admin.method import profiling, provenance, state_dict
from fairseq_admin.method.initial_weights import deepnorm_gains, t_fixup_gains
from fairseq_admin.method.norms import shortcut_norms
from fairseq_admin.method.schemes import SCHEMES, deepnorm_scales, layers_of, stacks_of

STOCK = {"post-ln": False, "pre-ln": True, "post-ln-pre-ln": True}
"""The schemes that are fairseq's own, with its decoder_normalize_before; the hybrid is its decoder's half."""

ADAPTIVE = {
    "adaptive_input": True,
    "adaptive_input_cutoff": "20,60",
    "adaptive_softmax_cutoff": "20,60",
    "tie_adaptive_weights": True,
    "tie_adaptive_proj": True,
    "share_decoder_input_output_embed": False,
}


def logits(model, words, seed=5):
    torch.manual_seed(seed)
    return model(words)[0]


def tells(scheme):
    """The scheme that a scheme's checkpoint shows."""
    drawn = dict.fromkeys(("looklinear", "ds-init", "ds-init-code"), "post-ln")
    return {**drawn, "post-ln-pre-ln": "pre-ln"}.get(scheme, scheme)


def omegas(model):
    return [norm.omega[0].item() for norm in shortcut_norms(model.decoder)]


# Stock fairseq -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", STOCK)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"share_decoder_input_output_embed": False, "decoder_learned_pos": True},
        {"layernorm_embedding": True, "activation_fn": "gelu", "no_scale_embedding": True},
        {"decoder_input_dim": 16, "decoder_output_dim": 24, "share_decoder_input_output_embed": False},
        {"decoder_layerdrop": 0.5},
        {"quant_noise_pq": 0.5},
        {"scale_fc": True, "scale_attn": True, "scale_heads": True},
        {"character_embeddings": True, "share_decoder_input_output_embed": False},
        {"decoder_layers_to_keep": "0,2"},
        ADAPTIVE,
    ],
)
def test_stock_schemes_are_stock(scheme, options):
    """Same names, same initial weights, same training forward and same gradients, bit for bit."""
    ours = build(admin_scheme=scheme, **options)
    stock = build("transformer_lm", decoder_normalize_before=STOCK[scheme], **options)
    assert ours.state_dict().keys() == stock.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), stock.parameters()))
    outputs = logits(ours, batch()), logits(stock, batch())
    assert torch.equal(*outputs)
    for output in outputs:
        output.square().mean().backward()
    pairs = list(zip(ours.parameters(), stock.parameters()))
    assert all((a.grad is None) == (b.grad is None) for a, b in pairs)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs if a.grad is not None)
    assert any(a.grad is not None and a.grad.abs().max() > 0 for a, _ in pairs)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_building_one_leaves_fairseqs_own_as_it_was(scheme):
    before = build("transformer_lm")
    build(admin_scheme=scheme)
    after = build("transformer_lm")
    assert type(before.decoder) is type(after.decoder) and type(after.decoder).__name__ == "TransformerDecoder"


def test_admin_differs_from_stock_by_omega_only():
    ours, stock = build(), build("transformer_lm")
    added = ours.state_dict().keys() - stock.state_dict().keys()
    names = [f"decoder.layers.{i}.{norm}_layer_norm" for i in range(3) for norm in ("self_attn", "final")]
    expected = {f"{name}.omega_{part}" for name in names for part in ("init", "delta")} | {provenance.KEY}
    assert added == expected - {f"{names[0]}.omega_delta"}
    assert stock.state_dict().keys() <= ours.state_dict().keys()


def test_open_widths_follow_the_embedding():
    """fairseq's own default of 512 would put a projection before and after a narrower decoder."""
    model = build(decoder_input_dim=None, decoder_output_dim=None)
    assert model.decoder.project_in_dim is None and model.decoder.output_projection.in_features == language.WIDTH


def test_the_options_given_stay_as_they_were():
    """They are saved in the checkpoint; normalize_before there would be refused on loading."""
    args = Namespace(**language.options("transformer_lm_admin", admin_scheme="pre-ln"))
    before = copy.deepcopy(vars(args))
    words = reference.dictionary(10)
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    model = type(build()).build_model(args, task)
    assert vars(args) == before and model.decoder.layer_norm is not None


# Schemes -------------------------------------------------------------------------------------------------------------

A = 6 ** (1 / 4)
"""DeepNorm's constant of 3 layers alone: (2 · 3)^(1/4)."""

BY_HAND = {
    "post-ln": reference.post_ln(),
    "pre-ln": reference.pre_ln,
    "post-ln-pre-ln": reference.pre_ln,
    "deepnorm": reference.post_ln(A),
    "rezero": reference.no_ln,
    "rezero-post-ln": reference.post_ln(),
    **dict.fromkeys(("t-fixup", "t-fixup-code"), reference.no_ln),
    **dict.fromkeys(("b2t", "b2t-code"), reference.b2t),
    **dict.fromkeys(("looklinear", "ds-init", "ds-init-code"), reference.post_ln()),
    "residual": reference.ResiDual(),
    "peri-ln": reference.peri_ln,
    "keel": reference.keel(6),  # 2 · 3
}


@pytest.mark.parametrize("scheme", BY_HAND)
@pytest.mark.parametrize("padded", [False, True])
def test_whole_model_is_the_plain_twin(scheme, padded):
    model = build(admin_scheme=scheme, **STILL)
    for number, layer in enumerate(model.decoder.layers):
        if getattr(layer, "branch_scale", None) is not None:
            torch.nn.init.constant_(layer.branch_scale, 0.3 + 0.2 * number)
    words = batch(padded=padded)
    expected = language.by_hand(model, words, BY_HAND[scheme], bottom=SCHEMES[scheme].bottom)
    real = words.ne(reference.PAD)
    # Sums of a dozen sub-layers in float32, in another order.
    torch.testing.assert_close(model(words)[0][real], expected[real], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("padded", [False, True])
def test_fixup_is_the_plain_twin(padded):
    model, words = reference.scattered(build(admin_scheme="fixup", **STILL)), batch(padded=padded)
    expected, real = language.fixup_by_hand(model, words), words.ne(reference.PAD)
    # As above. A future word masks padding, so the plain twin needs no mask of its own for it.
    torch.testing.assert_close(model(words)[0][real], expected[real], rtol=1e-4, atol=2e-5)


def test_fixup_starts_at_its_embedding():
    """Every branch is 0 at first, so the output matrix gets the embedding itself."""
    model, words = build(admin_scheme="fixup", **STILL), batch()
    expected = language._embedded(model.decoder, words).transpose(0, 1)
    assert torch.equal(model(words, features_only=True)[0], expected)


def test_every_scheme_has_a_twin():
    assert BY_HAND.keys() | {"admin", "fixup"} == SCHEMES.keys()  # these two are below


def test_constants_of_a_stack_alone():
    # (2 · 18)^(1/4) = 36^(1/4) = sqrt(6) = 2.449490; (8 · 18)^(-1/4) = 1 / sqrt(12) = 0.288675;
    # (9 · 16)^(-1/4), the same.
    assert deepnorm_scales(0, 18)[1] == pytest.approx(2.449490, abs=1e-6)
    assert deepnorm_scales(18, 0)[0] == pytest.approx(2.449490, abs=1e-6)
    assert deepnorm_gains(0, 18)[1] == pytest.approx(0.288675, abs=1e-6)
    assert deepnorm_gains(18, 0)[0] == pytest.approx(0.288675, abs=1e-6)
    assert t_fixup_gains(0, 16)[1] == pytest.approx(0.288675, abs=1e-6)


GAINS = {
    "deepnorm": lambda kind, layer: 1.0 if kind in "qk" else 24**-0.25,  # (8 · 3)^(-1/4)
    "t-fixup": lambda kind, layer: 1.0 if kind in "qk" else 27**-0.25,  # (9 · 3)^(-1/4)
    "t-fixup-code": lambda kind, layer: 2**-0.5 if kind in "qk" else 27**-0.25,
    "ds-init": lambda kind, layer: (layer + 1) ** -0.5,
    "ds-init-code": lambda kind, layer: (layer + 1) ** -0.25 * (2**-0.5 if kind in "qkv" else 1.0),
    "admin": lambda kind, layer: 1.0 if kind in ("fc1", "fc2") else None,
    "looklinear": lambda kind, layer: 1.0 if kind in ("fc1", "fc2") else None,
    # 6 branches, of 4 linear layers and of 2; fairseq's own gain of queries, keys and values.
    "fixup": lambda kind, layer: {"out": 0.0, "fc1": 6 ** (-1 / 2), "fc2": 0.0}.get(kind, 2**-0.5 * 6 ** (-1 / 6)),
}
"""Xavier's gain of a layer's matrices; None: fairseq's own law."""

ABSENT = {
    **dict.fromkeys(("rezero", "t-fixup", "t-fixup-code"), r"layers\.\d\.\w+_layer_norm\.(weight|bias)"),
    "fixup": r"layers\.\d\.(\w+_layer_norm\.weight|self_attn\.\w+_proj\.bias|fc[12]\.bias)",
}
"""Which of stock fairseq's parameters a scheme lacks."""


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_parameter_has_its_initial_law(scheme):
    """Standard deviations over 20 seeds, of the formula, or of stock fairseq's model; zero where it is zero."""
    count = 20
    ours = [dict(build(admin_scheme=scheme, seed=seed).named_parameters()) for seed in range(count)]
    stock = [dict(build("transformer_lm", seed=seed).named_parameters()) for seed in range(100, 100 + count)]

    def std(models, name):
        return torch.stack([model[name].detach() for model in models]).double().std(correction=0).item()

    checked = 0
    for name, parameter in ours[0].items():
        kind = name.split(".")[-2].split("_")[0] if "layers." in name else ""
        found, matrix = std(ours, name), name.endswith("weight") and kind in ("q", "k", "v", "out", "fc1", "fc2")
        gain = GAINS.get(scheme, lambda kind, layer: None)(kind, int(name.split(".")[2])) if matrix else None
        if "omega_delta" in name or "branch_scale" in name:
            assert found == 0
            continue
        if name not in stock[0]:
            # Fixup's single numbers, the norm that ends a stack, and a branch's.
            assert parameter.numel() == 1 or "norm." in name, name
            assert found == 0 and parameter[0].item() == name.endswith(("weight", "branch_multiplier"))
            continue
        if gain is not None:
            expected = gain * math.sqrt(2 / sum(parameter.shape))
        elif ".fc" in name and name.endswith("bias") and scheme in GAINS:
            expected = 0.0
        elif scheme == "ds-init-code" and name.endswith("proj.bias"):
            expected = 0.0
        elif "embed_tokens" in name and scheme.startswith("t-fixup"):
            expected = 27**-0.25 * std(stock, name)
        else:
            expected = std(stock, name) * (3**-0.5 if matrix and scheme == "b2t-code" else 1.0)
        # A deviation over n normal draws is off by 1/sqrt(2 n): 5 σ of the smaller of both, 20 times its elements.
        assert found == pytest.approx(expected, rel=5 * math.sqrt(2) / math.sqrt(2 * count * parameter.numel())), name
        checked += 1
    assert checked >= 3 * (6 if scheme == "fixup" else 8 + 4) + 1
    absent = {name for name in stock[0] if re.fullmatch(rf"decoder\.{ABSENT.get(scheme)}", name)}
    assert stock[0].keys() - ours[0].keys() == absent and bool(absent) == (scheme in ABSENT)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_training_forward_is_generation_forward(scheme):
    """Word by word with the cache of keys and values, as fairseq-generate does."""
    model, words = build(admin_scheme=scheme, **STILL), batch(padded=False)
    model(words)  # profiles
    model.eval()
    with torch.no_grad():
        whole = model(words)[0]
        state = {}
        steps = [model(words[:, : t + 1], incremental_state=state)[0] for t in range(words.size(1))]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_checkpointed_activations_and_layerdrop(scheme):
    plain, wrapped = build(admin_scheme=scheme), build(admin_scheme=scheme, checkpoint_activations=True)
    outputs = []
    for model in (plain, wrapped):
        output = logits(model, batch())
        output.square().mean().backward()
        outputs.append(output)
    assert torch.equal(*outputs)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), wrapped.parameters()))
    dropped = build(admin_scheme=scheme, decoder_layerdrop=0.5)
    assert len(shortcut_norms(dropped.decoder)) == 6 and logits(dropped, batch()).isfinite().all()


@pytest.mark.parametrize("made", [build, masked.build, partial(reference.build, "transformer_admin_tiny")])
def test_offloading_is_checkpointing(made):
    """Does --offload-activations alone do something, as with fairseq's own presets?"""
    for options, wrapped in (({}, False), ({"offload_activations": True}, True)):
        layers = [layer for stack in stacks_of(made(**options)).values() for layer in layers_of(stack)]
        assert layers and all(hasattr(layer, "precheckpoint_forward") == wrapped for layer in layers)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(scheme, dtype):
    model = build(admin_scheme=scheme).to(dtype)
    assert logits(model, batch()).dtype == dtype and model.profiled
    if scheme == "admin":
        assert 1.0 < omegas(model)[-1] < 10


# Profiling -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["reference", "paper"])
@pytest.mark.parametrize("padded", [True, False])
def test_profile_against_the_layers_written_out(rule, padded):
    model, words = build(), batch(padded=padded)
    torch.manual_seed(3)
    measured = profiling.measure(model, None, words, rule)
    torch.manual_seed(3)
    expected = language.profile_by_hand(model, words, rule)
    assert len(expected) == 6 and max(expected) > 1.2
    # float32 activations of half a dozen sub-layers, each off by a few roundings of 6e-8.
    assert measured.tolist() == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("options", [{}, ADAPTIVE, {"decoder_layerdrop": 0.9}, {"checkpoint_activations": True}])
def test_the_first_training_forward_profiles_and_no_other(options):
    model, words = build(**options).eval(), batch()
    model(words)
    assert set(omegas(model)) == {1.0} and not model.profiled
    model.train()
    torch.manual_seed(3)
    model(words)
    first, twin = omegas(model), build(**options)
    torch.manual_seed(3)
    assert first == profiling.measure(twin, None, words, "reference").tolist()
    model(batch(seed=9))
    assert omegas(model) == first and first[0] == 1.0 and len(set(first)) == 6
    record = provenance.decode(model.state_dict()[provenance.KEY])
    tokens = int(words.ne(reference.PAD).sum())
    assert record == {"rule": "reference", "tokens": tokens, "seed": 3, "version": fairseq_admin.__version__}


def test_profile_tokens():
    model = build(admin_profile_tokens=25)
    model(batch())  # 11 words a sentence: two fit
    assert provenance.decode(model.state_dict()[provenance.KEY])["tokens"] == 11 + 10


def test_the_log_line(caplog):
    with caplog.at_level("INFO"):
        build()(batch(padded=False))
    line = next(record.getMessage() for record in caplog.records if "profiled" in record.getMessage())
    assert line.startswith("Admin: profiled by rule reference on 88 tokens in ")
    assert ": decoder 6 sub-layers, omega 1.000 to " in line


@pytest.mark.parametrize("rule, omega", [("log", 1.6116105), ("constant", math.sqrt(6))])
def test_rules_by_depth_need_no_batch(rule, omega):
    # log, S = 6: 7 / ln 7 = 3.5972884, less 1 = 2.5972884, root = 1.6116105.
    model = build(admin_init=rule)
    assert model.profiled and omegas(model) == [pytest.approx(omega, abs=1e-6)] * 6


def test_padding_only():
    with pytest.raises(AdminError, match=r"first training batch holds no token \(\(2, 5\), all padding\)"):
        build()(torch.full((2, 5), reference.PAD))


def test_nan():
    model = build()
    with torch.no_grad():
        model.decoder.embed_tokens.weight[7, 3] = math.nan
    with pytest.raises(AdminError, match="profiling measured nan for omega at sub-layer 2 of the decoder"):
        model(torch.full((2, 5), 7))


# Checkpoints ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved", SCHEMES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_checkpoints_load_into_their_own_scheme_only(saved, scheme):
    state = build(admin_scheme=saved, seed=3).state_dict()
    assert state_dict.scheme(state) == tells(saved)
    model = build(admin_scheme=scheme)
    if tells(saved) == tells(scheme):
        model.load_state_dict(state)
        assert all(torch.equal(tensor, model.state_dict()[key]) for key, tensor in state.items())
    elif scheme == "admin" and tells(saved) == "post-ln":
        model.load_state_dict(state)
    elif scheme == "admin" and tells(saved) == "pre-ln":
        with pytest.raises(AdminError, match="Pre-LN Transformer .it has decoder.layer_norm.; Admin takes Post-LN"):
            model.load_state_dict(state)
    else:
        with pytest.raises(AdminError, match=f"^the checkpoint is of --admin-scheme {tells(saved)} and the model of"):
            model.load_state_dict(state)


def test_stock_post_ln_loads_with_omega_1_and_the_same_function():
    stock, ours = build("transformer_lm", seed=3).eval(), build()
    ours.load_state_dict(stock.state_dict())
    assert ours.profiled and set(omegas(ours)) == {1.0}
    ours(batch())
    assert set(omegas(ours)) == {1.0}
    assert torch.equal(ours.eval()(batch())[0], stock(batch())[0])
    assert provenance.decode(ours.state_dict()[provenance.KEY])["rule"] == "stock checkpoint, omega = 1"


def test_another_depth():
    with pytest.raises(AdminError, match="the checkpoint's decoder has 3 layers and the model's has 2. Use"):
        build(decoder_layers=2).load_state_dict(build().state_dict())


def test_a_loaded_model_is_not_profiled_again():
    model, other = build(), build(seed=2)
    model(batch())
    other.load_state_dict(model.state_dict())
    other(batch(seed=9))
    assert omegas(other) == omegas(model)
    assert [len(part) for part in state_dict.omegas(model.state_dict()).values()] == [6]


def test_skipped_updates_stop():
    model = build(admin_max_skipped_updates=2)
    for _ in range(2):
        model.set_num_updates(5)
    with pytest.raises(DivergedError, match="update 5 was skipped 2 times in a row"):
        model.set_num_updates(5)


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ({"decoder_normalize_before": True}, "^--decoder-normalize-before was given, .* --admin-scheme pre-ln"),
        ({"scale_resids": True}, "^scale_resids was given"),
        ({"base_layers": 1}, "^--base-layers 1 was given"),
        ({"decoder_layers": 0}, "^--decoder-layers is 0; at least 1"),
        (
            {"decoder_layers_to_keep": "1,3"},
            "^--decoder-layers-to-keep is 1,3; expected different numbers from 0 to 2,",
        ),
        ({"admin_init": "fixup"}, "^--admin-init is fixup; expected one of"),
        ({"admin_scheme": "mixup"}, "^--admin-scheme is mixup; expected one of"),
        ({"admin_scheme": "pre-ln", "admin_init": "log"}, "^--admin-init log was given with --admin-scheme pre-ln"),
        ({"admin_profile_tokens": 0}, "^--admin-profile-tokens is 0"),
        ({"admin_scheme": "t-fixup", **ADAPTIVE}, "^--admin-scheme t-fixup scales one embedding matrix"),
        ({"admin_scheme": "looklinear", "decoder_ffn_embed_dim": 33}, "^--decoder-ffn-embed-dim is 33"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(AdminError, match=message):
        build(**options)
