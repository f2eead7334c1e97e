"""The masked language model: stock RoBERTa where it should be, each scheme what it says, ω as a plain loop measures it,
one line where it cannot work."""

from __future__ import annotations

import math
import re

import masked
import pytest
import reference
import torch
from fairseq.models.roberta import RobertaEncoder
from language import STILL
from masked import batch, build

import fairseq_admin
from fairseq_admin.errors import AdminError
from fairseq_admin.method import profiling, provenance, state_dict
from fairseq_admin.method.schemes import SCHEMES

KNOWN = [scheme for scheme in SCHEMES if not scheme.startswith("t-fixup")]
STOCK = {
    "post-ln": {},
    "post-ln-pre-ln": {},
    "pre-ln": {"encoder_normalize_before": True, "layernorm_embedding": False},
}
"""The schemes that are fairseq's own, with the options of its roberta; the hybrid is its encoder's half."""


def logits(model, words, seed=5):
    torch.manual_seed(seed)
    return model(words)[0]


def tells(scheme):
    """The scheme that a scheme's checkpoint shows."""
    drawn = dict.fromkeys(("looklinear", "ds-init", "ds-init-code", "post-ln-pre-ln"), "post-ln")
    return drawn.get(scheme, scheme)


def omegas(model):
    return [omega[0].item() for omega in state_dict.omegas(model.state_dict())["encoder"].values()]


# Stock fairseq -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", STOCK)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"untie_weights_roberta": True, "activation_fn": "relu"},
        {"encoder_layerdrop": 0.5},
        {"quant_noise_pq": 0.5},
        {"checkpoint_activations": True},
        {"encoder_layers_to_keep": "0,2"},
    ],
)
def test_stock_schemes_are_stock(scheme, options):
    """Same names, same initial weights, same training forward and same gradients, bit for bit."""
    ours, stock = build(admin_scheme=scheme, **options), build("roberta", **STOCK[scheme], **options)
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


def test_admin_differs_from_stock_by_omega_only():
    ours, stock = build().state_dict(), build("roberta").state_dict()
    norms = [f"encoder.sentence_encoder.layers.{i}.{n}_layer_norm" for i in range(3) for n in ("self_attn", "final")]
    added = {f"{norm}.omega_{part}" for norm in norms for part in ("init", "delta")} | {provenance.KEY}
    assert ours.keys() - stock.keys() == added - {f"{norms[0]}.omega_delta"} and stock.keys() <= ours.keys()


# Schemes -------------------------------------------------------------------------------------------------------------

BY_HAND = {
    "post-ln": reference.post_ln(),
    "pre-ln": reference.pre_ln,
    "post-ln-pre-ln": reference.post_ln(),
    "deepnorm": reference.post_ln(6 ** (1 / 4)),  # (2 · 3)^(1/4)
    "rezero": reference.no_ln,
    "rezero-post-ln": reference.post_ln(),
    **dict.fromkeys(("b2t", "b2t-code"), reference.b2t),
    **dict.fromkeys(("looklinear", "ds-init", "ds-init-code"), reference.post_ln()),
    "residual": reference.ResiDual(),
    "peri-ln": reference.peri_ln,
    "keel": reference.keel(6),  # 2 · 3
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("scheme", [*BY_HAND, "fixup"])
def test_whole_model_is_the_plain_twin(scheme, padded):
    model, words = reference.scattered(build(admin_scheme=scheme, **STILL)), batch(padded=padded)
    if scheme == "fixup":
        expected = masked.fixup_by_hand(model, words)
    else:
        expected = masked.by_hand(model, words, BY_HAND[scheme], bottom=SCHEMES[scheme].bottom)
    real = words.ne(reference.PAD)
    # Sums of a dozen sub-layers in float32, in another order.
    torch.testing.assert_close(model(words)[0][real], expected[real], rtol=1e-4, atol=2e-5)


def test_every_scheme_has_a_twin():
    assert BY_HAND.keys() | {"admin", "fixup"} == set(KNOWN)  # admin's is below


GAINS = {
    "deepnorm": lambda kind, layer: 1.0 if kind in "qk" else 24**-0.25,  # (8 · 3)^(-1/4)
    "ds-init": lambda kind, layer: (layer + 1) ** -0.5,
    "ds-init-code": lambda kind, layer: (layer + 1) ** -0.25 * (2**-0.5 if kind in "qkv" else 1.0),
    "admin": lambda kind, layer: 1.0 if kind in ("fc1", "fc2") else None,
    "looklinear": lambda kind, layer: 1.0 if kind in ("fc1", "fc2") else None,
    # 6 branches, of 4 linear layers and of 2; fairseq's own gain of queries, keys and values.
    "fixup": lambda kind, layer: {"out": 0.0, "fc1": 6 ** (-1 / 2), "fc2": 0.0}.get(kind, 2**-0.5 * 6 ** (-1 / 6)),
}
"""Xavier's gain of a layer's matrices; None: RoBERTa's own law."""


@pytest.mark.parametrize("scheme", KNOWN)
def test_every_matrix_has_its_initial_law(scheme):
    """Standard deviations over 20 seeds; biases are 0. RoBERTa draws every other matrix from N(0, 0.02²)."""
    models = [dict(build(admin_scheme=scheme, seed=seed).named_parameters()) for seed in range(20)]
    checked = 0
    for name, parameter in models[0].items():
        found = re.fullmatch(
            r"encoder\.sentence_encoder\.layers\.(\d)\.(?:self_attn\.)?([a-z]+\d?)(_proj)?\.weight", name
        )
        if name.endswith("bias") and not name.endswith("_bias") and ("proj" in name or "fc" in name):
            assert not parameter.any(), name
        if not found or parameter.dim() != 2:
            continue
        gain = GAINS.get(scheme, lambda kind, layer: None)(found[2], int(found[1]))
        expected = 0.02 if gain is None else gain * math.sqrt(2 / sum(parameter.shape))
        expected *= 3**-0.5 if scheme == "b2t-code" else 1.0
        drawn = torch.stack([model[name].detach() for model in models]).double().std(correction=0).item()
        # A deviation over n normal draws is off by 1/sqrt(2 n): 5 σ; looks-linear's halves are the same draws.
        assert drawn == pytest.approx(expected, rel=5 / math.sqrt(20 * parameter.numel())), name
        checked += 1
    assert checked == 3 * 6


LAYER = "encoder.sentence_encoder.layers.1"


@pytest.mark.parametrize(("scheme", "law"), [("post-ln", "xavier"), ("b2t-code", "xavier"), ("admin", "stock")])
def test_feed_forward_weights_by_option(scheme, law):
    """Xavier-uniform, or RoBERTa's N(0, 0.02²)."""
    models = [build(admin_scheme=scheme, admin_ffn_init=law, seed=seed) for seed in range(20)]
    for name in ("fc1", "fc2"):
        assert not any(model.get_parameter(f"{LAYER}.{name}.bias").any() for model in models)
        drawn = torch.stack([model.get_parameter(f"{LAYER}.{name}.weight").detach().double() for model in models])
        expected = 0.02 if law == "stock" else math.sqrt(2 / sum(drawn.shape[1:]))
        expected *= 3**-0.5 if scheme == "b2t-code" else 1.0
        assert drawn.std(correction=0).item() == pytest.approx(expected, rel=5 / math.sqrt(2 * drawn.numel())), name


# Profiling -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["reference", "paper"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "options", [{"dropout": 0.1}, {**STILL, "encoder_layerdrop": 0.5}], ids=["dropout", "layerdrop"]
)
def test_profile_is_the_plain_loop(rule, padded, options):
    model, words = build(**options), batch(padded=padded)
    torch.manual_seed(3)
    measured = profiling.measure(model, words, None, rule)
    torch.manual_seed(3)
    expected = masked.profile_by_hand(model, words, rule)
    assert len(expected) == 6 and max(expected) > 1.2
    # float32 activations of half a dozen sub-layers, each off by a few roundings of 6e-8.
    assert measured.tolist() == pytest.approx(expected, rel=2e-6)


def test_the_first_training_forward_profiles_and_no_other():
    model, words = build().eval(), batch()
    model(words)
    assert set(omegas(model)) == {1.0} and not model.profiled
    model.train()
    torch.manual_seed(3)
    model(words, features_only=True)
    first, twin = omegas(model), build()
    torch.manual_seed(3)
    assert first == profiling.measure(twin, words, None, "reference").tolist()
    model(batch(seed=9), masked_tokens=batch(seed=9).eq(7))
    assert omegas(model) == first and first[0] == 1.0 and len(set(first)) == 6
    tokens = int(words.ne(reference.PAD).sum())
    record = provenance.decode(model.state_dict()[provenance.KEY])
    assert record == {"rule": "reference", "tokens": tokens, "seed": 3, "version": fairseq_admin.__version__}


@pytest.mark.parametrize("rule, omega", [("log", 1.6116105), ("constant", math.sqrt(6))])
def test_rules_by_depth_need_no_batch(rule, omega):
    # log, S = 6: 7 / ln 7 = 3.5972884, less 1 = 2.5972884, root = 1.6116105.
    model = build(admin_init=rule)
    assert model.profiled and omegas(model) == [pytest.approx(omega, abs=1e-6)] * 6


# Checkpoints ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved", KNOWN)
@pytest.mark.parametrize("scheme", KNOWN)
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
        with pytest.raises(AdminError, match="Pre-LN Transformer .it has encoder.layer_norm.; Admin takes Post-LN"):
            model.load_state_dict(state)
    else:
        with pytest.raises(AdminError, match=f"^the checkpoint is of --admin-scheme {tells(saved)} and the model of"):
            model.load_state_dict(state)


def older(state):
    """A state dict under the names that RoBERTa's published models have."""
    renamed = {}
    for key, tensor in state.items():
        key = key.replace("layernorm_embedding", "emb_layer_norm")
        renamed["decoder" + key[len("encoder") :] if key.startswith("encoder") else key] = tensor
    for layer in range(masked.LAYERS):
        attention = f"decoder.sentence_encoder.layers.{layer}.self_attn."
        for kind in ("weight", "bias"):
            parts = [renamed.pop(f"{attention}{name}_proj.{kind}") for name in "qkv"]
            renamed[f"{attention}in_proj_{kind}"] = torch.cat(parts)
    return renamed


@pytest.mark.parametrize("names", ["today's", "older"])
def test_stock_post_ln_loads_with_omega_1_and_the_same_function(names):
    stock, ours = build("roberta", seed=3).eval(), build()
    ours.load_state_dict(older(stock.state_dict()) if names == "older" else stock.state_dict())
    assert ours.profiled and set(omegas(ours)) == {1.0}
    ours(batch())
    assert set(omegas(ours)) == {1.0}
    assert torch.equal(ours.eval()(batch())[0], stock(batch())[0])
    assert provenance.decode(ours.state_dict()[provenance.KEY])["rule"] == "stock checkpoint, omega = 1"


def test_another_depth():
    with pytest.raises(AdminError, match="the checkpoint's encoder has 3 layers and the model's has 2. Use"):
        build(encoder_layers=2).load_state_dict(build().state_dict())


def test_classification_head():
    """What fine-tuning adds to RoBERTa: it trains over a loaded model, is saved, and loads again."""
    model, other = build(), build(seed=2)
    model(batch())
    for each in (model, other):
        each.register_classification_head("mood", num_classes=3)
    other.load_state_dict(model.state_dict())
    assert omegas(other) == omegas(model)
    scores = [each.eval()(batch(), classification_head_name="mood")[0] for each in (model, other)]
    assert torch.equal(*scores) and scores[0].shape == (8, 3)


def test_building_one_leaves_fairseqs_own_as_it_was():
    build()
    assert type(build("roberta").encoder) is RobertaEncoder


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ({"encoder_normalize_before": True}, "^--encoder-normalize-before was given, .* --admin-scheme pre-ln"),
        ({"encoder_layers": 0}, "^--encoder-layers is 0; at least 1"),
        (
            {"encoder_attention_heads": 3},
            "^--encoder-attention-heads is 3; expected a divisor of --encoder-embed-dim, ",
        ),
        (
            {"encoder_layers_to_keep": "1,3"},
            "^--encoder-layers-to-keep is 1,3; expected different numbers from 0 to 2,",
        ),
        ({"admin_init": "fixup"}, "^--admin-init is fixup; expected one of"),
        ({"admin_scheme": "mixup"}, "^--admin-scheme is mixup; expected one of"),
        ({"admin_scheme": "pre-ln", "admin_init": "log"}, "^--admin-init log was given with --admin-scheme pre-ln"),
        ({"admin_scheme": "t-fixup"}, "^--admin-scheme t-fixup was given; its paper has no gain for an encoder alone"),
        ({"admin_scheme": "looklinear", "encoder_ffn_embed_dim": 33}, "^--encoder-ffn-embed-dim is 33"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(AdminError, match=message):
        build(**options)
