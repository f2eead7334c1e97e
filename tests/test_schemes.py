"""Every scheme computes its paper's formulas from its paper's initial weights, in every kind of model.

Schemes share a few mechanisms. Each mechanism is tested in every kind of model, and each scheme once.
"""

from __future__ import annotations

import copy
import functools

import pytest
import reference
import torch
from golden import schemes as initial
from kinds import KINDS, STILL, assert_equal, logits, trained
from reference import PAD

from fairseq_admin.errors import AdminError
from fairseq_admin.method import provenance, state_dict
from fairseq_admin.method.initial_weights import deepnorm_gains, t_fixup_gains
from fairseq_admin.method.schemes import MODEL_SCHEMES, SCHEMES, attentions_of, layers_of, stacks_of

MECHANISMS = ("admin", "pre-ln", "deepnorm", "rezero", "fixup", "b2t", "residual", "keel", "peri-ln")
"""One scheme per mechanism: ω; stock; a constant and weights; a trained scalar without norms; scalar biases; ..."""
TRANSLATION = KINDS["translation"]
IN_EVERY_KIND = [
    pytest.param(kind, scheme, id=f"{name}-{scheme}") for name, kind in KINDS.items() for scheme in MECHANISMS
]
EVERY_SCHEME = [
    pytest.param(TRANSLATION, scheme, id=scheme) for scheme in MODEL_SCHEMES if scheme not in MECHANISMS
] + IN_EVERY_KIND


# Formulas ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gains", "depths", "expected"),
    [
        # 60^4 * 12 = 155520000, its 16th root 3.250773, 0.87 / that; 4th root of 144 (sqrt 12). One stack: the same.
        (deepnorm_gains, (60, 12), (0.267629, 0.288675)),
        (deepnorm_gains, (18, 0), (0.288675, 0.288675)),
        # 4th root of 60 is 2.783158, 0.67 / that; 4th root of 108 is 3.223710. A decoder alone: 4th root of 144.
        (t_fixup_gains, (60, 12), (0.240734, 0.310202)),
        (t_fixup_gains, (0, 16), (0.288675, 0.288675)),
    ],
)
def test_gains_of_the_papers(gains, depths, expected):
    assert gains(*depths) == pytest.approx(expected, abs=1e-6)


def sublayers(scheme: str, sides: set[str]) -> dict[str, reference.Sublayer]:
    """A scheme's sub-layer for each stack: 3 encoder and 2 decoder layers, or one stack of 3 layers."""
    both = len(sides) == 2
    post, none = reference.post_ln(), reference.no_ln
    encoder, decoder = {
        "admin": (reference.admin,) * 2,
        "pre-ln": (reference.pre_ln,) * 2,
        "pre-ln-by-depth": (reference.pre_ln,) * 2,
        "post-ln-pre-ln": (post, reference.pre_ln),
        # 3^4 * 2 = 162; alone (2 * 3)^(1/4).
        "deepnorm": (reference.post_ln(0.81 * 162 ** (1 / 16) if both else 6**0.25), reference.post_ln(6**0.25)),
        "fixup": (reference.fixup,) * 2,
        **dict.fromkeys(("rezero", "t-fixup", "t-fixup-code"), (none, none)),
        **dict.fromkeys(("b2t", "b2t-code"), (reference.b2t,) * 2),
        "residual": (reference.ResiDual(), reference.ResiDual()),
        "keel": (reference.keel(6),) * 2,  # 2 · 3 and 3 · 2
        "peri-ln": (reference.peri_ln,) * 2,
    }.get(scheme, (post, post))
    return {side: {"encoder": encoder, "decoder": decoder}[side] for side in sides}


@pytest.mark.parametrize(("kind", "scheme"), EVERY_SCHEME)
def test_logits_and_gradients_are_those_of_the_layers_written_out(kind, scheme):
    """Logits and all gradients match the layers written out, on padded sentences, in double precision."""
    options = {"admin_init": "log"} if scheme == "admin" else {}
    model = reference.scattered(kind.build(admin_scheme=scheme, **STILL, **options).double())
    words = kind.batch()
    real = list(words.values())[-1].ne(PAD)
    # DeepNorm's a is stored in single precision. Fixup's attention may round fairseq's float32 softmax differently.
    tolerance = 1e-5 if scheme in ("deepnorm", "fixup") else 1e-10
    results = []
    for compute in (logits, lambda *a: reference.by_hand(*a, sublayers(scheme, words.keys()))):
        model.zero_grad()
        output = compute(model, words)[real]
        output.sin().sum().backward()
        results.append((output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}))
    (output, gradients), (expected, expected_gradients) = results
    torch.testing.assert_close(output, expected, rtol=0, atol=tolerance)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        scale = expected_gradients[name].abs().max()
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=0, atol=10 * tolerance * (1 + scale))


# Initial weights -----------------------------------------------------------------------------------------------------


def drawn(kind, seeds=10, **options) -> dict[str, torch.Tensor]:
    """Every parameter's values over several seeds, stacked along the first dimension."""
    models = [dict(kind.build(seed=100 + seed, **options).named_parameters()) for seed in range(seeds)]
    return {name: torch.stack([model[name].detach().double() for model in models]) for name in models[0]}


@functools.cache
def stock_laws(name: str) -> dict[str, dict[str, initial.Law]]:
    """The laws of fairseq's own models of a kind, by the scheme that they compute."""
    kind, laws = KINDS[name], {}
    for scheme, flags in kind.parts.items():
        values = drawn(kind._replace(build=kind.stock), initial.SEEDS, **dict.fromkeys(flags, True))
        laws[scheme] = {key: initial.measured(value) for key, value in values.items()}
    return laws


ALONE = ("admin", "deepnorm", "fixup", "looklinear", "pre-ln")
BY_OPTION = [("translation", "admin"), ("translation", "residual"), ("masked", "post-ln")]
OF_THE_AUTHORS = ("b2t-code", "ds-init-code", "t-fixup-code")
"""Schemes as in code, whose weights test_oracle.py compares with those of that code."""


@pytest.mark.parametrize(
    ("name", "scheme", "ffn"),
    [
        *(("translation", scheme, None) for scheme in MODEL_SCHEMES if scheme not in OF_THE_AUTHORS),
        *((name, scheme, None) for name in ("language", "masked") for scheme in ALONE),
        ("language", "t-fixup", None),  # its paper has no gain for an encoder alone
        *((name, scheme, ffn) for name, scheme in BY_OPTION for ffn in ("xavier", "stock")),
    ],
)
def test_every_parameter_has_its_name_shape_and_initial_law(name, scheme, ffn):
    """In models of both stacks every parameter has its law; in a model of one stack every linear layer.

    --admin-ffn-init selects the feed-forward's law, whatever the scheme's default.
    """
    parameters = drawn(KINDS[name], admin_scheme=scheme, admin_ffn_init=ffn)
    laws = initial.expected(scheme, stock_laws(name), ffn)
    if name == "translation":
        assert {key for key in parameters if not key.endswith(".omega_delta")} == laws.keys()
    else:
        laws = {key: law for key, law in laws.items() if initial.LINEAR.fullmatch(key)}
        assert len(laws) >= 3 * 6
    for key, law in laws.items():
        initial.assert_law(parameters[key], law, f"{scheme}: {key}")


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_looklinear_starts_linear(activation):
    """A looks-linear branch starts linear: [V, -V] relu([W, -W] x) = V W x, where V and W are the first halves."""
    model = TRANSLATION.build(admin_scheme="looklinear", activation_fn=activation, decoder_ffn_embed_dim=48).double()
    x = torch.randn(5, 2, 32, dtype=torch.float64)
    for layer in (*model.encoder.layers, *model.decoder.layers):
        half = layer.fc1.out_features // 2
        output = layer.fc2(layer.activation_fn(layer.fc1(x)))
        expected = x @ layer.fc1.weight[:half].t() @ layer.fc2.weight[:, :half].t()
        # fairseq's gelu computes in float32.
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-12 if activation == "relu" else 1e-6)


def test_t_fixup_scales_every_embedding_once():
    """Untied embeddings are N(0, 1/C) times (9M)^(-1/4) = 18^(-1/4) = 0.4855, padding 0. Outputs are not scaled."""
    parameters = drawn(TRANSLATION, 5, admin_scheme="t-fixup", share_all_embeddings=False)
    for stack in ("encoder", "decoder"):
        values = parameters[f"{stack}.embed_tokens.weight"]
        assert values.std().item() == pytest.approx(0.4855 * 32**-0.5, rel=0.03) and not values[:, PAD].any()
    output = parameters["decoder.output_projection.weight"]
    assert output.std().item() == pytest.approx(32**-0.5, rel=0.03)


@pytest.mark.parametrize("share", ["all", "decoder", "none"])
def test_fixups_output_projection_is_zero_unless_tied(share):
    tied = {"share_all_embeddings": share == "all", "share_decoder_input_output_embed": share == "decoder"}
    model = TRANSLATION.build(admin_scheme="fixup", **tied)
    assert bool(model.decoder.output_projection.weight.any()) == (share != "none")
    assert model.decoder.embed_tokens.weight.any()


# fairseq's own -------------------------------------------------------------------------------------------------------

ADAPTIVE = {
    **{"adaptive_input": True, "adaptive_input_cutoff": "20,60", "adaptive_softmax_cutoff": "20,60"},
    **{"tie_adaptive_weights": True, "tie_adaptive_proj": True, "share_decoder_input_output_embed": False},
}
UNTIED = {"share_decoder_input_output_embed": False}
STOCK = [
    *((name, scheme, {}) for name, kind in KINDS.items() for scheme in kind.parts),
    ("translation", "post-ln", {"admin_ffn_init": "stock", "encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5}),
    ("translation", "pre-ln", {"no_cross_attention": True, "no_decoder_final_norm": True, "layernorm_embedding": True}),
    ("translation", "pre-ln", {"share_all_embeddings": False, "quant_noise_pq": 0.3}),
    ("language", "pre-ln", {"decoder_learned_pos": True, "scale_fc": True, "scale_attn": True, "scale_heads": True}),
    ("language", "post-ln", {"decoder_input_dim": 16, "decoder_output_dim": 24, **UNTIED}),
    ("language", "post-ln", {"character_embeddings": True, "decoder_layers_to_keep": "0,2", **UNTIED}),
    ("language", "post-ln", ADAPTIVE),
    ("masked", "pre-ln", {"untie_weights_roberta": True, "activation_fn": "relu", "encoder_layerdrop": 0.5}),
    ("masked", "post-ln", {"quant_noise_pq": 0.5, "encoder_layers_to_keep": "0,2"}),
]


@pytest.mark.parametrize(
    ("name", "scheme", "options"), STOCK, ids=lambda it: it if isinstance(it, str) else "-".join(it) or "plain"
)
def test_stock_schemes_are_stock(name, scheme, options):
    """With the same seed, keys, weights, logits, gradients and trained weights equal stock fairseq's, bit for bit."""
    kind = KINDS[name]
    ours = kind.build(admin_scheme=scheme, **options)
    stock_options = {option: value for option, value in options.items() if option != "admin_ffn_init"}
    if (name, scheme) == ("masked", "pre-ln"):
        stock_options["layernorm_embedding"] = False  # as in fairseq's roberta_prenorm
    stock = kind.stock(**dict.fromkeys(kind.parts[scheme], True), **stock_options)
    assert [key for key, _ in ours.named_parameters()] == [key for key, _ in stock.named_parameters()]
    assert_equal(ours.state_dict(), stock.state_dict())
    assert_equal(*(trained(model, kind.batch()) for model in (ours, stock)))
    assert torch.equal(*(logits(model.eval(), kind.batch()) for model in (ours, stock)))


# Options and modes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "scheme"), [case for case in IN_EVERY_KIND if "masked" not in case.id])
def test_training_forward_is_generation_forward(kind, scheme):
    """Generation word by word, with cached keys and values and padded sources, matches the training forward."""
    model, words = reference.scattered(kind.build(admin_scheme=scheme, **STILL)), kind.batch()
    words["decoder"] = kind.batch(padded=False)["decoder"]
    training, state, steps = logits(model, words), {}, []
    model.eval()
    with torch.no_grad():
        encoder_out = model.encoder(words["encoder"]) if "encoder" in words else None
        for t in range(1, words["decoder"].size(1) + 1):
            steps.append(model.decoder(words["decoder"][:, :t], encoder_out, incremental_state=state)[0])
    # Matrix products of other shapes may sum in another order: a few roundings of 6e-8 per layer.
    torch.testing.assert_close(torch.cat(steps, 1), training, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("kind", "scheme"), IN_EVERY_KIND)
def test_activations_computed_again_change_nothing(kind, scheme):
    """Recomputed activations, offloaded or not, give the same bits, also with layerdrop and an embedding norm."""
    options = {"admin_scheme": scheme, "encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5, "layernorm_embedding": True}
    how = "offload_activations" if kind is TRANSLATION else "checkpoint_activations"
    plain, recomputed = (trained(kind.build(**options, **{how: value}), kind.batch()) for value in (False, True))
    assert_equal(plain, recomputed)
    assert plain["logits 1"].isfinite().all() and any("layernorm_embedding" in key for key in plain)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_activations_are_computed_again_in_the_types_of_the_forward(kind):
    """Activations are recomputed in the forward's types. Under --amp, fairseq's own wrapper recomputes in float32."""
    gradients = []
    for checkpointed in (False, True):
        model = kind.build(admin_scheme="post-ln", checkpoint_activations=checkpointed)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = logits(model, kind.batch())
        output.float().square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert_equal(*gradients)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("option", ["checkpoint_activations", "offload_activations"])
def test_no_layer_keeps_more_than_its_input(kind, option):
    """No layer keeps more than its input: the backward runs each layer's forward again."""
    calls = []
    model, words = kind.build(admin_scheme="post-ln", **{option: True}), kind.batch()
    for stack in stacks_of(model).values():
        layers_of(stack)[0].fc1.register_forward_hook(lambda *_: calls.append(1))
    output = logits(model, words)
    assert len(calls) == len(words)
    output.sum().backward()
    assert len(calls) == 2 * len(words)


@pytest.mark.parametrize("scheme", ["b2t", "residual"])
def test_a_model_is_copied_after_activations_were_computed_again(scheme):
    """A model can be copied after a recomputing backward, as --store-ema needs: no layer still holds an activation."""
    model = KINDS["translation"].build(admin_scheme=scheme, checkpoint_activations=True)
    logits(model, KINDS["translation"].batch()).sum().backward()
    copy.deepcopy(model)


def test_fixup_with_embeddings_of_another_kind():
    KINDS["language"].build(admin_scheme="fixup", adaptive_input=True, adaptive_input_cutoff="20,60", **UNTIED)


@pytest.mark.parametrize(("kind", "scheme"), IN_EVERY_KIND)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_float32_up_to_rounding(kind, scheme, dtype):
    """Half precision and autocast match float32, and under autocast every branch has autocast's type."""
    model = reference.scattered(kind.build(admin_scheme=scheme, **STILL))
    words = kind.batch()
    expected = logits(model, words)
    dtypes = []
    for stack in stacks_of(model).values():
        for module in (*attentions_of(layers_of(stack)[0]), layers_of(stack)[0].fc2):
            module.register_forward_hook(
                lambda module, inputs, output: dtypes.append((output[0] if isinstance(output, tuple) else output).dtype)
            )
    with torch.autocast("cpu", dtype=dtype):
        outputs = [logits(model, words).float()]
    assert set(dtypes) == {dtype}
    outputs.append(logits(model.to(dtype), words))
    assert outputs[1].dtype == dtype
    # float16 keeps 11 bits and bfloat16 8; rounding adds up over about twenty sums.
    share = 0.02 if dtype == torch.float16 else 0.1
    for output in outputs:
        assert (output.float() - expected).abs().max() < share * expected.abs().max()


# Checkpoints ---------------------------------------------------------------------------------------------------------

DRAWN = ("looklinear", "ds-init", "ds-init-code")
"""Post-LN with other initial weights. A checkpoint's keys do not show which."""


@pytest.mark.parametrize("scheme", MODEL_SCHEMES)
def test_the_state_dict_names_the_scheme_and_loads_again(scheme):
    model, other = (TRANSLATION.build(admin_scheme=scheme, seed=seed) for seed in (1, 2))
    state = reference.scattered(model).state_dict()
    assert state_dict.scheme(state) == ("post-ln" if scheme in DRAWN else scheme)
    assert (provenance.KEY in state) != SCHEMES[scheme].stock_layers and model.profiled == (scheme != "admin")
    other.load_state_dict(state)
    assert_equal(other.state_dict(), state)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    ("saved", "scheme", "message"),
    [
        ("deepnorm", "admin", "^the checkpoint is of --admin-scheme deepnorm and the model of --admin-scheme admin. G"),
        ("pre-ln", "admin", "^the checkpoint is a Pre-LN Transformer .*; Admin takes Post-LN weights only"),
        ("ds-init", "rezero", "^the checkpoint is of --admin-scheme post-ln and the model of --admin-scheme rezero."),
        ("ds-init", "post-ln", None),
        ("looklinear", "admin", None),
    ],
)
def test_checkpoints_load_into_their_own_scheme_only(kind, saved, scheme, message):
    state, model = kind.build(admin_scheme=saved, seed=3).state_dict(), kind.build(admin_scheme=scheme)
    if message:
        with pytest.raises(AdminError, match=message):
            model.load_state_dict(state)
        return
    stock = {key: tensor.clone() for key, tensor in state.items()}
    model.load_state_dict(state)
    assert_equal(stock, {key: model.state_dict()[key] for key in stock})
    assert scheme != "admin" or provenance.decode(model.state_dict()[provenance.KEY])["rule"].startswith("stock")


def test_scale_is_loaded_with_the_weights():
    """DeepNorm's a is in the state dict and not trained. A pruned model keeps the a that it was trained with."""
    saved = TRANSLATION.build(admin_scheme="deepnorm", seed=3)
    pruned = TRANSLATION.build(admin_scheme="deepnorm", encoder_layers_to_keep="0,2")
    scale = 0.81 * 162 ** (1 / 16)
    assert pruned.encoder.layers[1].shortcut_scale.item() != pytest.approx(scale)
    pruned.load_state_dict(saved.state_dict())
    assert [layer.shortcut_scale.item() for layer in pruned.encoder.layers] == pytest.approx([scale] * 2)
    assert not [name for name, _ in pruned.named_parameters() if "scale" in name]


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        *((name, {"admin_scheme": "sandwich"}, "^--admin-scheme is sandwich; expected one of adm") for name in KINDS),
        ("translation", {"admin_init": "fixup"}, "^--admin-init is fixup; expected one of reference.* or a number"),
        ("translation", {"admin_init": "-1"}, "^--admin-init is -1; expected one of reference.* or a number above 0"),
        ("translation", {"admin_profile_tokens": 0}, "^--admin-profile-tokens is 0; .* at least 1"),
        ("translation", {"admin_max_skipped_updates": -1}, "^--admin-max-skipped-updates is -1; .* at least 0"),
        ("translation", {"admin_monitor": -1}, "^--admin-monitor is -1; expected at least 0"),
        ("translation", {"base_layers": 1}, "^--base-layers 1 was given"),
        ("masked", {"admin_fast": False}, "^--admin-fast is False; expected one of on, off, graph"),
        ("translation", {"admin_ffn_init": "kaiming"}, "^--admin-ffn-init is kaiming; expected one of xavier, stock"),
        ("translation", {"admin_scheme": "deepnorm", "admin_init": "log"}, "^--admin-init log .* has no omega to set."),
        ("translation", {"admin_scheme": "fixup", "admin_ffn_init": "stock"}, "^--admin-ffn-init stock .*which draws"),
        ("translation", {"admin_scheme": "pre-ln", "encoder_normalize_before": True}, "give --admin-scheme pre-ln"),
        ("translation", {"encoder_layers": 0}, "^--encoder-layers is 0; Admin needs 1 or more"),
        ("translation", {"decoder_normalize_before": True}, "^--decoder-normalize-before was given"),
        ("translation", {"admin_scheme": "keel", "cross_self_attention": True}, "^--cross-self-attention was given"),
        ("translation", {"admin_scheme": "keel", "no_cross_attention": True}, "^--no-cross-attention was given with"),
        ("translation", {"admin_scheme": "looklinear", "encoder_ffn_embed_dim": 63}, "^looklinear needs .* 63 wide"),
        ("language", {"decoder_normalize_before": True}, "^--decoder-normalize-before was given, .* pre-ln"),
        ("language", {"scale_resids": True}, "^scale_resids was given"),
        ("language", {"decoder_layers_to_keep": "1,3"}, "^--decoder-layers-to-keep is 1,3; expected .* from 0 to 2,"),
        ("language", {"admin_scheme": "t-fixup", **ADAPTIVE}, "^T-Fixup scales one embedding matrix"),
        ("masked", {"encoder_normalize_before": True}, "^--encoder-normalize-before was given, .* pre-ln"),
        ("masked", {"encoder_layers_to_keep": "1,1"}, "^--encoder-layers-to-keep is 1,1; expected different numbers"),
        ("masked", {"admin_scheme": "t-fixup"}, "^T-Fixup was given for an encoder alone"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_options_that_do_not_go_together_are_refused(name, options, message):
    with pytest.raises(AdminError, match=message):
        KINDS[name].build(**options)
